"""Ctrl-C ends a run after the step it is in, so that the step is saved."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvforge.distill import world


@contextmanager
def noted_interrupt() -> Iterator[Callable[[], bool]]:
    """Within the block a first SIGINT or SIGTERM is only noted, and the yielded function says so; a second one acts at
    once. Not so outside of the main thread, and with several processes, which torchrun ends together."""
    if world.size() > 1 or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    noted = False
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.getsignal(number) for number in signals]

    def restore() -> None:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        noted = True
        restore()
        print("\nkvforge: saves this step when it is done and ends; once more ends at once", file=sys.stderr)

    for number in signals:
        signal.signal(number, note)
    try:
        yield lambda: noted
    finally:
        restore()
