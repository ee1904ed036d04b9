"""Bytes of answers that are gathered before they are sent, bounded for one and for all of them."""

from kvforge.gateway.errors import ApiError

ALL = 4
"""Answers of the largest size that may be held at once."""


class HeldAnswers:
    """What all open answers hold; `max_bytes` is of one."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def one(self) -> "HeldAnswer":
        return HeldAnswer(self)


class HeldAnswer:
    """One answer's share. `release` it when the answer is sent or given up."""

    def __init__(self, whole: HeldAnswers) -> None:
        self._all = whole
        self._num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """So much is held now. Raises ApiError: 400 where one answer must not grow so large, 429 where all must not."""
        self._all.num_bytes += num_bytes - self._num_bytes
        self._num_bytes = num_bytes
        if num_bytes > self._all.max_bytes:
            raise ApiError(
                400,
                f"the answer has grown beyond {self._all.max_bytes} bytes, the most that is gathered; set stream to "
                "true, or ask for fewer sequences, tokens or log-probabilities",
                code="answer_too_large",
            )
        if self._all.num_bytes > ALL * self._all.max_bytes:
            raise ApiError(
                429,
                "too many large answers are being gathered; try again, or set stream to true",
                code="too_many_requests",
            )

    def release(self) -> None:
        self._all.num_bytes -= self._num_bytes
        self._num_bytes = 0
