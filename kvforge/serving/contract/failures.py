"""How a request ends that does not end well: the error its client gets, and what it is counted as."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvforge.common.errors import KvforgeError, RequestError, first_line
from kvforge.common.refusals import SERVER_ENDS, Refusal
from kvforge.serving.contract.refusal_words import sentence

# Outcome -> error code of Triton (pb_utils.TritonError).
CODES = {
    "cancelled": "CANCELLED",
    "refused": "INVALID_ARG",
    "unavailable": "UNAVAILABLE",
    "deadline": "UNAVAILABLE",
    "lost": "UNAVAILABLE",
    "failed": "INTERNAL",
}
COMPLETED = "completed"
OUTCOMES = (COMPLETED, *CODES)


@dataclass(frozen=True)
class Failure:
    """`outcome` is a key of CODES; "lost" means that the engine went away, "unavailable" that it takes no more.
    `message` is for clients of Triton; `refusal` says why, where that is known as data."""

    outcome: str
    message: str
    refusal: Refusal | None = None

    @property
    def code(self) -> str:
        return CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """As data for JSON: what a response says in place of an error."""
        refusal = None if self.refusal is None else self.refusal.to_json()
        return {"outcome": self.outcome, "code": self.code, "message": self.message, "refusal": refusal}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Failure":
        """The inverse of `to_json`."""
        refusal = data["refusal"]
        return cls(data["outcome"], data["message"], None if refusal is None else Refusal.from_json(refusal))


def failed(outcome: str, refusal: Refusal) -> Failure:
    """The failure of a request for which such a reason is given."""
    return Failure(outcome, sentence(refusal), refusal)


CANCELLED = Failure("cancelled", "the request was cancelled")
SHUTTING_DOWN = failed("unavailable", SERVER_ENDS)


class FailedError(KvforgeError):
    """A request ends with this failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class UnavailableError(FailedError):
    """The server takes no more requests now; the same request may be served later."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(failed("unavailable", refusal))


def past_deadline(timeout_s: float) -> Failure:
    return Failure("deadline", f"the request's deadline has passed: its timeout was {timeout_s:g} s")


def failure_of(error: BaseException) -> Failure:
    """What an error means for the one request that it came of. One that is no Exception, such as a native library's
    panic, may name anything, so its words are left out."""
    if isinstance(error, FailedError):
        return error.failure
    if isinstance(error, RequestError):
        return failed("refused", error.refusal)
    if isinstance(error, Exception):
        return Failure("failed", f"the request failed: {first_line(error)}")
    return Failure("failed", "the request failed in a library that this server uses; change the request")
