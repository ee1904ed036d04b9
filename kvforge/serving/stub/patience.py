"""When a silent engine process counts as stalled."""

from collections.abc import Callable

LONGEST_LOOK_S = 0.5
"""A look that comes later than this after the last one counts as this much: the watcher itself did not run, and nobody
knows whether the engine could. So a standstill of the machine is no silence of the engine's."""


class Patience:
    """Follows one process's beats; `read` is `Heartbeat.read`, `clock` is monotonic. `is_overdue` is to be called
    several times a LONGEST_LOOK_S."""

    def __init__(self, read: Callable[[], tuple[float, float]], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._beats = -1.0
        self._looked_at = clock()
        self.silent_s = 0.0
        """Seconds of this watcher's own time since the last beat."""

    def is_overdue(self) -> bool:
        """Whether the last beat is longer ago than it allowed."""
        now = self._clock()
        passed = max(0.0, min(now - self._looked_at, LONGEST_LOOK_S))
        self._looked_at = now
        beats, allowance = self._read()
        if beats != self._beats:
            self._beats, self.silent_s = beats, 0.0
            return False
        self.silent_s += passed
        return self.silent_s > allowance
