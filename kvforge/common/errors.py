"""Errors a user can act on: each message is one sentence that says what to do."""

from kvforge.common.refusals import Refusal


class KvforgeError(Exception):
    """Base of all errors raised at a boundary; the CLI prints the message and exits with 1."""


MAX_LINE = 300


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none. A line that quotes what it is
    about whole ends after MAX_LINE characters."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…"


def let_end(error: BaseException) -> None:
    """Raise ``error`` again if it is to end the process: an interrupt or an exit. All else, such as the panic of a
    native library, which is no Exception, belongs to the request that it came from."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error


class CheckpointError(KvforgeError):
    """The checkpoint directory cannot be read as a supported model."""


class CheckpointWarning(UserWarning):
    """A file of a checkpoint says what its tensors or another of its files do not, or is not fit for what is mostly
    done; the message says which was taken, or what is done instead."""


class EngineError(KvforgeError):
    """The engine directory is missing, damaged, or was built for something else."""


class EngineReplacedError(EngineError):
    """The engine directory holds another engine than the one that was meant."""


class BuildError(KvforgeError):
    """The engine cannot be built with these options or on this machine."""


class RequestError(KvforgeError):
    """A request cannot be served as asked; nothing of it is kept. The arguments are those of a Refusal."""

    def __init__(
        self, reason: str, remedy: str = "", *, field: str | None = None, code: str | None = None, operator: str = ""
    ) -> None:
        self.refusal = Refusal(reason, remedy, field, code, operator)
        super().__init__(str(self.refusal))

    @classmethod
    def of(cls, refusal: Refusal) -> "RequestError":
        """The error that says this."""
        return RequestError(
            refusal.reason, refusal.remedy, field=refusal.field, code=refusal.code, operator=refusal.operator
        )


def refusal_of(error: BaseException) -> Refusal:
    """Why a request cannot be served, by an error that it came to."""
    if isinstance(error, RequestError):
        return error.refusal
    return Refusal(str(error).rstrip(".") if isinstance(error, KvforgeError) else f"{type(error).__name__}: {error}")


class MissingToolError(KvforgeError):
    """A program or package that is needed here is missing."""
