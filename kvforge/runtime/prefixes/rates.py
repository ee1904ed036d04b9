"""Whether reading a page is cheaper than computing it, by what both have taken so far."""

WEIGHT = 0.3
"""Of the newest measurement in an average."""
TRY_AGAIN = 32
"""Every so many prefixes that were not read, one is, so that a disk that was slow for a while is measured again."""


class Rates:
    """Seconds a page, as moving averages; reading is tried as long as one of them is not known."""

    def __init__(self) -> None:
        self.read_s: float | None = None
        self.compute_s: float | None = None
        self._num_declined = 0

    def read(self, num_pages: int, seconds: float) -> None:
        """Pages were read, their requests waiting so long."""
        self.read_s = _average(self.read_s, seconds / num_pages)

    def computed(self, num_pages: float, seconds: float) -> None:
        """Prompt tokens of so many pages were computed in a step."""
        self.compute_s = _average(self.compute_s, seconds / num_pages)

    def reading_is_cheaper(self) -> bool:
        """Whether to read the next prefix."""
        if self.read_s is None or self.compute_s is None or self.read_s < self.compute_s:
            return True
        self._num_declined += 1
        return self._num_declined % TRY_AGAIN == 0


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
