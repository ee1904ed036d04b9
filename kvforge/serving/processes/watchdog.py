"""Ends processes whose server is gone, so that nothing is orphaned when tritonserver is killed."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from kvforge.serving.processes.cleanup import ServerResources
from kvforge.serving.processes.facts import process_id, processes_of

PERIOD_S = 0.5
END_WITHIN_S = 5
"""Whole seconds that a process has to end the others; then SIGALRM ends it, whoever holds the interpreter's lock."""

_ending = threading.Lock()
"""Held by the watch that ends this process, so that the other one does not while it still has work to do."""


def exit_with_parent(before_exit: Callable[[], object] = lambda: None) -> None:
    """End this process, abruptly, soon after the process that started it has ended, and `before_exit`.

    Polling the parent's pid, because PR_SET_PDEATHSIG follows the parent's *thread*.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PERIOD_S)
        time.sleep(2 * PERIOD_S)  # where the server has ended too, `end_with_server` notices and goes first
        with _ending:
            try:
                before_exit()
            finally:
                os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_with_server(server_pid: int) -> None:
    """From a stub or the engine's process: when tritonserver ends, kill all its other processes and end this one.

    A stub that waits for an answer of a killed tritonserver holds the interpreter's lock for ever, so its own
    watch never runs: every process kills all the others before it ends itself, so that whichever is the last to
    be alive has killed them. When the launcher ended without ending its server, nobody would: this kills
    tritonserver too and removes what is left of it. Where that is so at the call, it does not return.
    """
    server = process_id(server_pid)
    leftovers = ServerResources.from_environment()
    launcher = None if leftovers is None else process_id(leftovers.launcher_pid)

    def is_orphan() -> bool:
        return leftovers is not None and (launcher is None or not launcher.is_alive())

    def is_over() -> bool:
        return server is None or not server.is_alive() or is_orphan()

    def end() -> None:
        signal.alarm(END_WITHIN_S)  # the kernel's: what follows lets others have the lock, and may never get it back
        sys.setswitchinterval(1e-5)
        _ending.acquire()
        orphan = leftovers if is_orphan() else None
        try:
            if orphan is not None:
                orphan.remove()  # at once, because one of the others may end this one first
            if server is not None:
                server.kill()
            for process in processes_of(server_pid, server):
                if process.pid != os.getpid():
                    process.kill()
            if orphan is not None:
                orphan.remove()  # what they wrote meanwhile
        finally:
            os._exit(1)

    def watch() -> None:
        while not is_over():
            time.sleep(PERIOD_S)
        end()

    if is_over():
        end()
    threading.Thread(target=watch, name="server-watch", daemon=True).start()
