"""Processor time that guides may take from all other requests."""

import time

from kvforge.common.errors import RequestError
from kvforge.runtime.requests.guided_decoding import gave_up

CREDIT_S = 0.2
"""What the guides of all sequences of one request may take at once; they have it at the start."""
EARNED_S = 0.002
"""What a request gets back with each step; a mask takes 0.05 to 0.3 ms with a vocabulary of 128k."""
STEP_S = 0.25
"""What the guides of all requests may take in one step of the engine, where some of them are costly."""
COSTLY_S = 0.02
"""A guide that took so much in one step, over all sequences that have it, is costly there."""
BRIEF_S = 0.001
"""What takes no longer is charged by the clock: to ask for processor time takes longer than a simple guide's token."""


class StepTime:
    """What guides have taken in the engine's present step; shared by all of them. ``number`` counts the steps. All
    methods but ``allows`` belong to the thread that runs the steps."""

    def __init__(self) -> None:
        self.number = 0
        self._total_s = 0.0
        self._of_guide: dict[int, float] = {}
        self._processor_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self.number += 1
        self._total_s = 0.0
        self._of_guide.clear()
        self.mark()

    def mark(self) -> None:
        """What the thread has done so far is no guide's."""
        self._processor_s = time.thread_time()

    def processor_time(self) -> float:
        """Return what the thread has had of its processor since the last ``mark``, and mark this moment."""
        before = self._processor_s
        self.mark()
        return self._processor_s - before

    def add(self, guide: int, seconds: float) -> None:
        """A sequence with this guide took so much."""
        self._total_s += seconds
        self._of_guide[guide] = self._of_guide.get(guide, 0.0) + seconds

    def allows(self, guide: int) -> bool:
        """There is time left, or the guide is none of those that took it."""
        return self._total_s < STEP_S or self._of_guide.get(guide, 0.0) < COSTLY_S


class GuideBudget:
    """Of one request, shared by its sequences: a credit of its own, and its part of each step.

    Work is charged between ``begin`` and ``end``; what fails in between costs nothing, as it ends its guide. ``last_s``
    is what was charged last. ``guide`` is the same number for requests with the same guide.
    """

    def __init__(self, guide: int = 0, step: StepTime | None = None) -> None:
        self._guide = guide
        self._step = StepTime() if step is None else step
        self._earned_in = self._step.number
        self._credit_s = CREDIT_S
        self._started = self.last_s = 0.0

    def allows(self, seconds: float) -> bool:
        """Work of so many seconds of processor time is within the budget."""
        return seconds <= self._credit_s and self._step.allows(self._guide)

    def begin(self) -> None:
        """Raises KvforgeError where the credit is spent, or the step's time by this guide and others like it."""
        if self._earned_in != self._step.number:
            self._earned_in = self._step.number
            self._credit_s = min(self._credit_s + EARNED_S, CREDIT_S)
        if not self.allows(0.0):
            raise _spent()
        self._started = time.perf_counter()

    def end(self) -> None:
        """Charge the processor time since ``begin``; raises KvforgeError where that was more than there is."""
        seconds = time.perf_counter() - self._started
        if seconds > BRIEF_S:
            seconds = min(seconds, self._step.processor_time())
        self.last_s = seconds
        self._credit_s -= seconds
        self._step.add(self._guide, seconds)
        if self._credit_s < 0:
            raise _spent()


def _spent() -> RequestError:
    return gave_up("the guide takes too much processor time")
