"""Who gives way when all cores are busy: what serves the engine, never the engine."""

import contextlib
import os
from pathlib import Path

from kvforge.serving.processes.facts import children

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


def lower(thread: int) -> bool:
    """Lower the priority of one thread, and so of those it starts from now on, to NICENESS above this one's; False
    where it was there. Not above its own: tritonserver's threads for models begin at 0, whatever it was started with.
    """
    wanted = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
    with contextlib.suppress(OSError):  # what has ended meanwhile needs no priority
        if os.getpriority(os.PRIO_PROCESS, thread) != wanted:
            os.setpriority(os.PRIO_PROCESS, thread, wanted)
            return True
    return False


def _lower_all(pid: int, but_parents: bool = False) -> None:
    """Until a look finds nothing to do: a thread that has not been lowered may start another meanwhile."""
    while any([lower(thread) for thread in _threads(pid) if not (but_parents and _has_children(pid, thread))]):
        pass


def _threads(pid: int) -> list[int]:
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _has_children(pid: int, thread: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:
        return False
