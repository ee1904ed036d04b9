"""Who gives way when all cores are busy: what serves the engine, never the engine."""

import contextlib
import os
from pathlib import Path

from kvforge.serving.processes import children

NICENESS = 10
"""Above that of the engine. A weight of 110 against 1024: with every core busy computing, serving still has a tenth of
the machine. What it is late with gathers, so that fewer and longer responses leave; and a step does not wait for the
one core on which a response was made."""


def yield_to_engine(server_pid: int) -> None:
    """Lower the priority of tritonserver and its stubs. The stub's thread that starts the engine keeps its own, which
    an engine that is started again inherits."""
    _lower_all(server_pid)
    for stub in children(server_pid):
        _lower_all(stub.pid, but_parents=True)


def lower(thread: int) -> None:
    """Lower the priority of one thread, and so of those it starts from now on."""
    with contextlib.suppress(OSError):  # what has ended meanwhile needs no priority
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness + NICENESS, 19))


def _lower_all(pid: int, but_parents: bool = False) -> None:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            if not (but_parents and (task / "children").read_text().split()):
                lower(int(task.name))
