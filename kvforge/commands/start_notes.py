"""What `kvforge serve` says while it starts, on a terminal or not: that it does, and from time to time still does."""

import threading
import time

from kvforge.common.display import Display

PERIOD_S = 10.0


class StartNotes:
    """Says that ``what`` starts, until it is closed. ``seconds`` are those since it began."""

    def __init__(self, display: Display, what: str, period_s: float = PERIOD_S) -> None:
        self._display, self._what, self._period_s = display, what, period_s
        self._began, self._ended = time.monotonic(), threading.Event()
        display.note(f"starting {what}")
        threading.Thread(target=self._go_on, daemon=True).start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        """Say nothing more. Idempotent."""
        self._ended.set()

    def _go_on(self) -> None:
        while not self._ended.wait(self._period_s):
            self._display.note(f"still starting {self._what}, {self.seconds:.0f} s")
