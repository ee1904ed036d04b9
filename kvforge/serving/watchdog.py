"""Ends processes whose server is gone, so that nothing is orphaned when tritonserver is killed."""

import os
import threading
import time
from collections.abc import Callable

from kvforge.serving.processes import ProcessId, children, process_id

PERIOD_S = 0.5


def exit_with_parent(before_exit: Callable[[], object] = lambda: None) -> None:
    """End this process, abruptly, soon after the process that started it has ended.

    `before_exit` runs first. Polling the parent's pid, because PR_SET_PDEATHSIG follows the parent's
    *thread*, and tritonserver starts its stubs from threads that end.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PERIOD_S)
        try:
            before_exit()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_with_server(server_pid: int) -> None:
    """From the engine's process: when tritonserver ends, kill its stubs and end this process.

    A stub that waits for an answer of a killed tritonserver holds the interpreter's lock for ever, so its own
    watch never runs; this one does.
    """
    server = process_id(server_pid)

    def watch() -> None:
        stubs: list[ProcessId] = []
        while server is not None and server.is_alive():
            stubs = children(server_pid) or stubs
            time.sleep(PERIOD_S)
        for stub in stubs:
            stub.kill()
        os._exit(1)

    threading.Thread(target=watch, name="server-watch", daemon=True).start()
