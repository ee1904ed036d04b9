"""What serves the engine gives way to it when the cores are busy."""

import contextlib
import os
from pathlib import Path

from kvforge.serving.engine import guide_thread
from kvforge.serving.processes.facts import children
from kvforge.serving.processes.priority import NICENESS
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.repository import MODELS
from tests.support.serving.server import ask, lasting_processes, text_of


def niceness(pid: int) -> list[int]:
    """Of every thread of a process that starts no process itself."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if not (task / "children").read_text().split():
                found.append(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return found


def test_server_and_stubs_yield_to_the_engine(server: TritonServer) -> None:
    text_of(server, ask("ensemble", "hello", 2))  # threads that begin later are as patient
    own = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    stubs = children(server.pid)
    assert len(stubs) == len(MODELS)
    (engine,) = {p.pid for p in lasting_processes(server.pid)} - {stub.pid for stub in stubs}
    for stub in stubs:
        assert set(niceness(stub.pid)) == {own}
    assert set(niceness(server.pid)) == {own}
    steps = os.getpriority(os.PRIO_PROCESS, 0)
    assert [level for level in niceness(engine) if level != steps] == [min(19, steps + guide_thread.NICENESS)]
