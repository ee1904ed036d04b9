"""Ends a process whose parent is gone, so that nothing is orphaned when tritonserver is killed."""

import os
import threading
import time
from collections.abc import Callable

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
