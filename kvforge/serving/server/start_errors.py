"""Why a server did not start, as far as it matters to who starts it."""

from kvforge.common.errors import KvforgeError


class PortTakenError(KvforgeError):
    """The port of this name belongs to somebody else."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"the server did not start: {why}; choose another with --{name}-port, or 0 for any free port")
        self.name = name


class StartBrokeOffError(KvforgeError):
    """tritonserver stood still or crashed while it started, without a word of why."""


class StartCancelled(KvforgeError):
    """`start` ended because it was told to."""


def did_not_start(why: str) -> KvforgeError:
    """The error of a start that is not made once more."""
    return KvforgeError(f"the server did not start: {why}")
