"""Found by every Python process with this folder in $PYTHONPATH: an engine process that a signal makes stop stepping.

Handlers run on the main thread, the one that steps.
"""

import ctypes
import signal
import sys


def _spin(signum: int, frame: object) -> None:
    while True:
        pass


def _hold(signum: int, frame: object) -> None:
    ctypes.PyDLL(None).sleep(3600)  # a native call that does not let go of the interpreter's lock


if "kvforge.serving.engine.process" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, _spin)
    signal.signal(signal.SIGUSR2, _hold)
