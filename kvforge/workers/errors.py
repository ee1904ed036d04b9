"""Why a job has no answer."""

from kvforge.common.errors import KvforgeError


class WorkerError(KvforgeError):
    """Base of all."""


class WorkerDied(WorkerError):
    """The worker ended while it had the job: killed, crashed, or ended by what the job raised.

    `raised` is the name of the exception's type, where it was one ("MemoryError", "PanicException").
    """

    def __init__(self, message: str, raised: str | None = None) -> None:
        super().__init__(message)
        self.raised = raised


class WorkerTimeout(WorkerError):
    """The job took longer than it may, in wall or processor time; its worker was killed."""


class WorkersUnavailable(WorkerError):
    """The job was not begun: no worker starts, too many jobs wait, or the pool is closed."""


class WorkersBusy(WorkersUnavailable):
    """Too many jobs wait."""
