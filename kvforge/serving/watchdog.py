"""Ends processes whose server is gone, so that nothing is orphaned when tritonserver is killed."""

import os
import threading
import time
from collections.abc import Callable

from kvforge.serving.leftovers import Leftovers
from kvforge.serving.processes import process_id, stubs_of

PERIOD_S = 0.5


def exit_with_parent() -> None:
    """End this process, abruptly, soon after the process that started it has ended.

    Polling the parent's pid, because PR_SET_PDEATHSIG follows the parent's *thread*.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PERIOD_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_with_server(server_pid: int, before_exit: Callable[[], object] = lambda: None) -> None:
    """From a stub or the engine's process: when tritonserver ends, kill all its stubs and end this process.

    A stub that waits for an answer of a killed tritonserver holds the interpreter's lock for ever, so its own
    watch never runs: every process kills the others before it ends itself, and whichever is the last to be alive
    has killed them all. `before_exit` runs after that. When the launcher ended without ending its server, nobody
    would: this kills tritonserver too and removes what is left of it.
    """
    server = process_id(server_pid)
    leftovers = Leftovers.from_environment()
    launcher = None if leftovers is None else process_id(leftovers.launcher_pid)

    def is_orphan() -> bool:
        return leftovers is not None and (launcher is None or not launcher.is_alive())

    def watch() -> None:
        while server is not None and server.is_alive() and not is_orphan():
            time.sleep(PERIOD_S)
        orphan = leftovers if is_orphan() else None
        try:
            if orphan is not None:
                orphan.remove()  # before the stubs' end, with which this process may end too
            if server is not None:
                server.kill()
            for stub in stubs_of(server_pid):
                if stub.pid != os.getpid():
                    stub.kill()
            if orphan is not None:
                orphan.remove()  # what they wrote meanwhile
            before_exit()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="server-watch", daemon=True).start()
