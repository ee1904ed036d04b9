"""Counts the signals that ask the process to stop: one drains, a second one does not wait any longer."""

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP only count. To be entered on the main thread.

    A plain number, looked at now and then: an Event set by a handler can find its own lock taken.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[signal.Signals, object] = {}

    def stop(self) -> bool:
        """True after the first signal."""
        return self.count > 0

    def hurry(self) -> bool:
        """True after the second signal."""
        return self.count > 1

    def __enter__(self) -> "StopSignals":
        self._previous = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
