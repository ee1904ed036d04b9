"""What steps cost, measured as they run: plain ones, and ones with drafts by their number."""

KEPT = 0.95
"""Weight of a step after each later one."""
RECENT = 0.8
"""The same of ``speed``."""
LARGEST = 2.0
"""A step counts at most this many times what was expected of it."""
GUESS = 0.02
"""Of a plain step: what a draft costs before any was measured."""


class StepCost:
    """Seconds of a step of one number of sequences: ``plain``, or with x drafts ``drafted + per_draft * x``.

    ``speed`` is what steps with drafts have given of late, tokens a second, 0 before the first: the line does not know
    that drafts which are right may cost more than others.

    The line is a weighted least-squares fit through the newest steps, and through the plain one so that it is defined
    where all have the same number of drafts.
    """

    def __init__(self) -> None:
        self.is_known = False
        self.plain = self.drafted = self.per_draft = self.speed = 0.0
        self._tokens = self._seconds = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add_plain(self, seconds: float) -> None:
        """A step without drafts took this long; hiccups and first steps are forgotten sooner than they are learnt."""
        if not self.is_known:
            self.is_known, self.plain = True, seconds
        else:
            share = 0.5 if seconds < self.plain else 0.1
            self.plain += share * (min(seconds, LARGEST * self.plain) - self.plain)
        self._fit()

    def add_drafted(self, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """A step with this many drafts gave so many tokens and took this long, drafting included."""
        if self._weight > 2.0:
            seconds = min(seconds, LARGEST * (self.drafted + self.per_draft * num_drafts))
        self._tokens = self._tokens * RECENT + num_tokens
        self._seconds = self._seconds * RECENT + seconds
        self.speed = self._tokens / max(self._seconds, 1e-9)
        self._weight = self._weight * KEPT + 1.0
        self._x = self._x * KEPT + num_drafts
        self._y = self._y * KEPT + seconds
        self._xx = self._xx * KEPT + num_drafts * num_drafts
        self._xy = self._xy * KEPT + num_drafts * seconds
        self._fit()

    def _fit(self) -> None:
        if not self._weight:
            self.drafted, self.per_draft = self.plain, GUESS * self.plain
            return
        weight, y = self._weight + self.is_known, self._y + self.plain * self.is_known
        spread = self._xx - self._x * self._x / weight
        slope = (self._xy - self._x * y / weight) / spread if spread > 1e-9 else 0.0
        self.per_draft = max(slope, 0.0)
        self.drafted = max((y - self.per_draft * self._x) / weight, 1e-9)
