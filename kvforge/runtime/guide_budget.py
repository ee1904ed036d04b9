"""Processor time that guides may take from all other requests."""

import contextlib
import time
from collections.abc import Hashable, Iterator

from kvforge.errors import KvforgeError

CREDIT_S = 0.2
"""What the guides of all sequences of one request may take at once; they have it at the start."""
EARNED_S = 0.002
"""What a request gets back with each step; a mask takes 0.05 to 0.3 ms with a vocabulary of 128k."""
STEP_S = 0.25
"""What the guides of all requests may take in one step of the engine, where some of them are costly."""
COSTLY_S = 0.02
"""A guide that took so much in one step, over all sequences that have it, is costly there."""


class StepTime:
    """What guides have taken in the engine's present step; shared by all of them. ``number`` counts the steps."""

    def __init__(self) -> None:
        self.number = 0
        self._total_s = 0.0
        self._of_guide: dict[Hashable, float] = {}

    def begin(self) -> None:
        """A step begins."""
        self.number += 1
        self._total_s = 0.0
        self._of_guide.clear()

    def add(self, guide: Hashable, seconds: float) -> None:
        """A sequence with this guide took so much."""
        self._total_s += seconds
        self._of_guide[guide] = self._of_guide.get(guide, 0.0) + seconds

    def allows(self, guide: Hashable) -> bool:
        """There is time left, or the guide is none of those that took it."""
        return self._total_s < STEP_S or self._of_guide.get(guide, 0.0) < COSTLY_S


class GuideBudget:
    """Of one request, shared by its sequences: a credit of its own, and its part of each step."""

    def __init__(self, guide: Hashable = None, step: StepTime | None = None) -> None:
        self._guide = guide
        self._step = StepTime() if step is None else step
        self._earned_in = self._step.number
        self._credit_s = CREDIT_S

    def allows(self, seconds: float) -> bool:
        """Work of so many seconds of processor time is within the budget."""
        return seconds <= self._credit_s and self._step.allows(self._guide)

    @contextlib.contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the processor time of what is done inside.

        Raises:
            KvforgeError: the credit is spent, now or before, or the step's time by this guide and others like it.
        """
        if self._earned_in != self._step.number:
            self._earned_in = self._step.number
            self._credit_s = min(self._credit_s + EARNED_S, CREDIT_S)
        if not self.allows(0.0):
            raise _spent()
        started = time.thread_time()
        yield
        seconds = time.thread_time() - started
        self._credit_s -= seconds
        self._step.add(self._guide, seconds)
        if self._credit_s < 0:
            raise _spent()


def _spent() -> KvforgeError:
    return KvforgeError("guided decoding gave up: the guide takes too much processor time; simplify it.")
