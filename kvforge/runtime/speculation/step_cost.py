"""What steps cost, measured as they run: plain ones, and ones with drafts by their number."""

import math

KEPT = 0.95
"""Weight of a step after each later one."""
MAX_RATIO = 1.25
"""A step counts at most this many times what was expected of it, and a plain one at least its inverse."""
FIRST_STEPS = 4
"""Of so many plain steps the fastest counts."""
TRIAL = 1.5
"""So many plain steps' time drafts may take that are not expected to pay."""
GUESS = 0.02
"""Of a plain step: what a draft costs before any was measured."""


class StepCost:
    """Seconds of a step of one number of sequences: ``plain``, or with x drafts ``drafted + per_draft * x``, of which a
    step had ``most_drafts``.

    ``plain`` is the moving mean of steps in which nothing was tried. The line is a weighted least-squares fit through
    the newest steps with drafts, and through the plain one so that it is defined where all have the same number of
    drafts. Hiccups are cut short in both.
    """

    def __init__(self) -> None:
        self.plain = self.drafted = self.per_draft = 0.0
        self.most_drafts = self._num_plain = 0
        self._least = math.inf
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        """There was a plain step."""
        return self._num_plain > 0

    def add_plain(self, seconds: float) -> None:
        """A step without drafts took this long."""
        self._num_plain += 1
        if self._num_plain <= FIRST_STEPS:
            self.plain = min(seconds, self.plain or seconds)
        else:
            seconds = min(max(seconds, self.plain / MAX_RATIO), self.plain * MAX_RATIO)
            self.plain = KEPT * self.plain + (1.0 - KEPT) * seconds
        self._fit()

    @property
    def trial(self) -> int:
        """How many drafts take ``TRIAL``, if each takes what it did in the step that was best: where a step's first
        draft is dear and the others are not, more of them are tried each time."""
        return int(min(TRIAL * self.plain / self._least if self._least else math.inf, 1e9))

    def add_drafted(self, num_drafts: int, seconds: float, looking: float = 0.0) -> float:
        """A step with this many drafts took this long, drafting included, of which they were looked for so long;
        returns the time that it counts as."""
        self._least = min(self._least, max(seconds - looking - self.plain, 0.0) / num_drafts)
        if self._weight > 2.0:
            seconds = min(seconds, MAX_RATIO * (self.drafted + self.per_draft * num_drafts))
        self.most_drafts = max(self.most_drafts, num_drafts)
        self._weight = self._weight * KEPT + 1.0
        self._x = self._x * KEPT + num_drafts
        self._y = self._y * KEPT + seconds
        self._xx = self._xx * KEPT + num_drafts * num_drafts
        self._xy = self._xy * KEPT + num_drafts * seconds
        self._fit()
        return seconds

    def _fit(self) -> None:
        if not self._weight:
            self.drafted, self.per_draft = self.plain, GUESS * self.plain
            return
        weight, y = self._weight + self.is_known, self._y + self.plain * self.is_known
        spread = self._xx - self._x * self._x / weight
        slope = (self._xy - self._x * y / weight) / spread if spread > 1e-9 else 0.0
        self.per_draft = max(slope, 0.0)
        self.drafted = max((y - self.per_draft * self._x) / weight, 1e-9)
