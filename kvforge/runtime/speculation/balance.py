"""What drafting may still lose: it lives on what it has gained, and on a small share of the time without it."""

import math

FIRST, ENOUGH = 0.5, 0.25
"""Balance to begin with, and from which drafting is tried again."""
MIN_STEPS, MAX_STEPS = -2.0, 2.0
"""So many steps without drafting always suffice, and so soon it ends where it no longer pays."""
SHARE, PATIENCE, HALVINGS = 0.01, 6, 2
"""Of the time without drafting: what is spent on trying it. After so many attempts in a row that lost all they had,
each further one halves it, so many times at most; one that gets beyond ``FIRST`` ends the row."""


class Balance:
    """Account of drafting, in plain steps: ``is_open`` while there is something left to lose.

    A step with drafting that took the time of x plain ones and gave the tokens of y adds y - x, a plain step adds
    ``SHARE`` or less. Once overdrawn, drafting stops until the balance is ``ENOUGH``. So it loses at most ``SHARE`` of
    the time and ``FIRST``, whatever was expected of it, but for the last step of each attempt, which may overdraw.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._steps, self._num_failed = FIRST, 0

    @property
    def _share(self) -> float:
        return SHARE / 2 ** min(max(self._num_failed - PATIENCE, 0), HALVINGS)

    @property
    def num_closed(self) -> int:
        """So many steps more go without drafting."""
        return 0 if self.is_open else max(math.ceil((ENOUGH - self._steps) / self._share - 1e-6), 1)

    def follow(self, other: "Balance") -> None:
        """Begin as the other stands, of a number of sequences near this one: with no more than it has, and closed where
        it is. So ``FIRST`` is lost once and not at each number."""
        self.is_open, self._steps = other.is_open, min(max(other._steps, 0.0), FIRST)

    def add_drafting(self, gained: float) -> float:
        """A step with drafting was worth so many plain steps more than it took; returns what is not kept of them."""
        steps = self._steps + gained
        self._steps = min(max(steps, MIN_STEPS), MAX_STEPS)
        if self._steps > FIRST:
            self._num_failed = 0
        if self._steps <= 0:
            self._num_failed += self.is_open
            self.is_open = False
        return max(steps - MAX_STEPS, 0.0)

    def add_plain(self, num_steps: int = 1) -> None:
        """Steps went without drafting."""
        self._steps = min(self._steps + self._share * num_steps, MAX_STEPS)
        if self._steps >= ENOUGH:
            self.is_open = True
