"""Disposable worker processes: work that a stranger's input makes long, large or deadly, outside of the process that
must go on.

    WorkerPool(command, size, memory_bytes).call(request bytes, timeout_s) -> answer bytes

The program that `command` starts calls `serve(prepare)`. A worker that dies, hangs or takes too much memory costs the
job that it had, and is replaced.
"""

from kvforge.workers.child import serve
from kvforge.workers.errors import WorkerDied, WorkerError, WorkersBusy, WorkersUnavailable, WorkerTimeout
from kvforge.workers.pool import WARM_WITHIN_S, WorkerPool

__all__ = [
    "WARM_WITHIN_S",
    "WorkerDied",
    "WorkerError",
    "WorkerPool",
    "WorkerTimeout",
    "WorkersBusy",
    "WorkersUnavailable",
    "serve",
]
