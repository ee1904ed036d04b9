"""Processor time that the guides of one request may take from all others."""

import contextlib
import time
from collections.abc import Callable, Iterator

from kvforge.errors import KvforgeError

CREDIT_S = 0.2
"""At the start and at most: what the guides of all sequences of a request may take in one step of the engine."""
EARNED_S = 0.002
"""For each token; a mask takes 0.05 to 0.3 ms with a vocabulary of 128k."""


class GuideBudget:
    """Shared by the sequences of one request. ``on_spent`` is called once, when the budget is spent."""

    def __init__(self, on_spent: Callable[[], object] = lambda: None) -> None:
        self._credit_s = CREDIT_S
        self._on_spent = on_spent
        self._is_spent = False

    def earn(self) -> None:
        """A token is due."""
        self._credit_s = min(self._credit_s + EARNED_S, CREDIT_S)

    def allows(self, seconds: float) -> bool:
        """Work of so many seconds of processor time is within the budget."""
        return not self._is_spent and seconds <= self._credit_s

    @contextlib.contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the processor time of what is done inside.

        Raises:
            KvforgeError: the budget is spent, now or before.
        """
        self._check()
        started = time.thread_time()
        yield
        self._credit_s -= time.thread_time() - started
        if self._credit_s < 0:
            self._is_spent = True
            self._on_spent()
            self._check()

    def _check(self) -> None:
        if self._is_spent:
            raise KvforgeError("guided decoding gave up: the guide takes too much processor time; simplify it.")
