"""What this package starts as a process of its own: a module, which ends with the thread that has started it."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).resolve().parents[2]


def module_environment(**defaults: str) -> dict[str, str]:
    """Return the environment in which ``python -m`` finds modules of this package, with ``defaults`` where this process
    has no such variables."""
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ending(code: int) -> str:
    """Return how a process has ended, in words."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
