"""Where the threads of a process stand, for one that does not go on: it writes that to its log when it is asked to."""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from kvforge.serving.processes.facts import ProcessId

ASKED = signal.SIGUSR1
WRITING_S = 0.5


def show_when_asked() -> None:
    """From now on this process answers `ask`, whoever holds the interpreter's lock."""
    faulthandler.register(ASKED, all_threads=True)


def ask(processes: Iterable[ProcessId]) -> None:
    """Have those that answer write where their threads stand; returns when they have had the time."""
    asked = [process for process in processes if process.is_alive() and _answers(process.pid)]
    for process in asked:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, ASKED)
    if asked:
        time.sleep(WRITING_S)


def _answers(pid: int) -> bool:
    """Whether it catches the signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (ASKED - 1) & 1)
