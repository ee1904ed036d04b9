"""How long a piece of the engine's work may take: a floor, and some times what the largest piece so far predicts."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvforge.runtime.step.work import Work

FLOOR_S = 5.0
"""Above anything that a busy machine does to a step of milliseconds."""
FACTOR = 5.0
"""Times the predicted time: a machine whose cores are shared, or a cache that this piece does not fit any more."""
FIRST_S = 120.0
"""For a piece that may compile, capture or page in what it needs: the first of a kind or of a variant, from which
nothing is learnt, and the one after it."""
WINDOW = 1000
"""Pieces of a kind after which the largest before them is forgotten, so that a moment's disturbance is too."""


@dataclass(slots=True)
class Largest:
    """The longest time of a number of pieces, and the most units of one of them."""

    seconds: float = 0.0
    units: float = 0.0

    def take(self, seconds: float, units: float) -> None:
        if seconds > self.seconds:
            self.seconds = seconds
        if units > self.units:
            self.units = units

    def predict(self, units: float) -> float:
        """An upper bound for a piece of `units`, as time grows no faster than units do; infinite without pieces."""
        if units <= self.units:
            return self.seconds
        return self.seconds * units / self.units if self.units else math.inf


@dataclass(slots=True)
class KindOfWork:
    """What is known of a kind: its largest piece ever, of late, and since `num_seen` was last a multiple of WINDOW."""

    ever: Largest = field(default_factory=Largest)
    recent: Largest = field(default_factory=Largest)
    current: Largest = field(default_factory=Largest)
    num_seen: int = 0
    variants: set[tuple[int, ...]] = field(default_factory=set)

    def is_first(self, variant: tuple[int, ...]) -> bool:
        """Whether no piece of the variant was asked for before."""
        if variant in self.variants:
            return False
        self.variants.add(variant)
        return True

    def take(self, seconds: float, units: float) -> None:
        self.num_seen += 1
        if self.num_seen % WINDOW == 0:
            self.recent, self.current = self.current, Largest()
        for largest in (self.ever, self.recent, self.current):
            largest.take(seconds, units)

    def allowance(self, units: float) -> float:
        """For a piece of `units`. Both the largest ever and the largest of late bound it: the smaller bound holds."""
        predicted = min(self.ever.predict(units), self.recent.predict(units))
        return FIRST_S if predicted == math.inf else FLOOR_S + FACTOR * predicted


class Pulse:
    """Beats before each piece of work, for as long as that may take; called on the engine's thread alone.

    `beat` takes seconds (`Heartbeat.beat`). A piece that took longer than it was allowed was not killed, so the machine
    stood still with its watcher: nothing is learnt from it.
    """

    def __init__(
        self, beat: Callable[[float], object] = lambda allowance_s: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._beat = beat
        self._clock = clock
        self._kinds: dict[str, KindOfWork] = {}
        self._work: Work | None = None
        self._began = self._allowance = 0.0

    def begins(self, work: Work) -> None:
        """This piece of work begins, and the one before it has ended."""
        self._end()
        kind = self._kinds.get(work.kind)
        if kind is None:
            kind = self._kinds[work.kind] = KindOfWork()
        if kind.is_first(work.variant):
            self._begin(None, FIRST_S)
        else:
            self._begin(work, kind.allowance(work.units))

    def idles(self) -> None:
        """What was under way has ended; small things follow, or nothing."""
        self._end()
        self._begin(None, FLOOR_S)

    def may_take(self, seconds: float) -> None:
        """What follows has a length of its own."""
        self._end()
        self._begin(None, seconds)

    def _begin(self, work: Work | None, allowance_s: float) -> None:
        self._work, self._allowance, self._began = work, allowance_s, self._clock()
        self._beat(allowance_s)

    def _end(self) -> None:
        if self._work is not None:
            seconds = self._clock() - self._began
            if seconds <= self._allowance:
                self._kinds[self._work.kind].take(seconds, self._work.units)
            self._work = None
