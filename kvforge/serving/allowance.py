"""How long a piece of the engine's work may take: a floor, and some times what the largest piece so far predicts."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvforge.runtime.step_work import Work

FLOOR_S = 5.0
"""Above anything that a busy machine does to a step of milliseconds."""
FACTOR = 5.0
"""Times the predicted time: a machine whose cores are shared, or a cache that this piece does not fit any more."""
FIRST_S = 120.0
"""For a piece that may compile, capture or page in what it needs: the first of a kind or of a variant, from which
nothing is learnt, and the one after it."""
WINDOW = 1000
"""Pieces of a kind after which the largest before them is forgotten, so that a moment's disturbance is too."""


@dataclass
class Largest:
    """The longest time of a number of pieces, and the most units of one of them."""

    seconds: float = 0.0
    units: float = 0.0

    def take(self, seconds: float, units: float) -> None:
        self.seconds, self.units = max(self.seconds, seconds), max(self.units, units)

    def predict(self, units: float) -> float:
        """An upper bound for a piece of `units`, as time grows no faster than units do; infinite without pieces."""
        return self.seconds * max(1.0, units / self.units) if self.units else math.inf


@dataclass
class KindOfWork:
    """What is known of one kind: its largest piece ever, and that of the last WINDOW pieces and those in `current`."""

    ever: Largest = field(default_factory=Largest)
    last: Largest = field(default_factory=Largest)
    current: Largest = field(default_factory=Largest)
    num_seen: int = 0
    variants: set[tuple[int, ...]] = field(default_factory=set)

    def is_first(self, variant: tuple[int, ...]) -> bool:
        """Whether no piece of the variant was asked for before."""
        is_first = variant not in self.variants
        self.variants.add(variant)
        return is_first

    def take(self, seconds: float, units: float) -> None:
        self.num_seen += 1
        if self.num_seen % WINDOW == 0:
            self.last, self.current = self.current, Largest()
        self.ever.take(seconds, units)
        self.current.take(seconds, units)

    def allowance(self, units: float) -> float:
        """For a piece of `units`. Both the largest ever and the largest lately bound it: the smaller bound holds."""
        recent = Largest(self.current.seconds, self.current.units)
        recent.take(self.last.seconds, self.last.units)
        predicted = min(self.ever.predict(units), recent.predict(units))
        return FIRST_S if math.isinf(predicted) else FLOOR_S + FACTOR * predicted


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
        kind = self._kinds.setdefault(work.kind, KindOfWork())
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
