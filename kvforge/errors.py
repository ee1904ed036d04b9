"""Errors a user can act on: each message is one sentence that says what to do."""


class KvforgeError(Exception):
    """Base of all errors raised at a boundary; the CLI prints the message and exits with 1."""


class CheckpointError(KvforgeError):
    """The checkpoint directory cannot be read as a supported model."""


class EngineError(KvforgeError):
    """The engine directory is missing, damaged, or was built for something else."""


class BuildError(KvforgeError):
    """The engine cannot be built with these options or on this machine."""


class RequestError(KvforgeError):
    """A request cannot be served as asked; nothing of it is kept."""


class MissingToolError(KvforgeError):
    """A program or package that is needed here is missing."""
