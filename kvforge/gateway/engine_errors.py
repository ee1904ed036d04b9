"""How requests end badly behind the gateway, as answers of HTTP. Only what a client can use is said to it."""

from collections.abc import Mapping

import grpc

from kvforge.gateway.engine_words import GUIDE, refusal
from kvforge.gateway.errors import ApiError
from kvforge.runtime.requests.outputs import NO_TOKEN_LEFT
from kvforge.serving.contract.failures import SHUTTING_DOWN

_FAILED = "the inference server failed; its log says why"
_NOT_LOADED = ("unknown model", "not ready", "is not healthy", "no available versions", "Server exiting", "stopping")
"""The model is missing or unloaded, its process ended, the server goes down."""


def from_outcome(outcome: str, message: str, names: Mapping[str, str]) -> ApiError:
    """How `tensorrt_llm` says that a request ended (kvforge.serving.contract.failures); `names` are those of fields,
    see kvforge.gateway.engine_words."""
    if outcome == "refused":
        return refusal(message, names)
    if outcome == "unavailable" and "queue is full" in message:
        return ApiError(
            429, "too many requests wait for the model; send the request again later", code="queue_full", detail=message
        )
    if outcome == "unavailable" and "jobs wait for a worker" in message:
        return ApiError(
            429, "too many new forms wait to be checked; send the request again later", code="queue_full",
            detail=message,
        )  # fmt: skip
    if "guided decoding gave up" in message:
        field = names.get(GUIDE)
        what = "the form that the request" if field is None else f"the form that '{field}'"
        return ApiError(400, f"{what} asks for became too complex to keep to; simplify it", field, "guide_gave_up",
                        message)  # fmt: skip
    if NO_TOKEN_LEFT in message:
        field = names.get(GUIDE) or "logit_bias"
        return ApiError(400, f"'{field}' leaves no token to generate at some place of the text; relax it", field,
                        "no_token_left", message)  # fmt: skip
    if message == SHUTTING_DOWN.message:
        return ApiError(503, message, code="engine_unavailable")
    status, code, words = _OUTCOMES.get(outcome, (500, None, _FAILED))
    return ApiError(status, words, code=code, detail=message)


_OUTCOMES: dict[str, tuple[int, str | None, str]] = {
    "unavailable": (503, "engine_unavailable", "the model cannot take requests at the moment; try again later"),
    "lost": (503, "engine_unavailable", "the engine that worked on this request has ended; try again"),
    "deadline": (504, "deadline_exceeded", "the request's deadline has passed; ask for fewer tokens"),
    "cancelled": (499, "cancelled", "the request was cancelled"),
}


def from_triton_error(message: str) -> ApiError:
    """What Triton itself says where the model is not there to answer; of its errors a stream carries only the words."""
    if any(words in message for words in _NOT_LOADED):
        return ApiError(503, "the engine is not loaded; try again later", code="engine_unavailable", detail=message)
    return ApiError(500, _FAILED, detail=message)


def from_rpc_error(code: grpc.StatusCode, details: str) -> ApiError:
    """The stream itself broke, or nothing answers."""
    if code is grpc.StatusCode.UNAVAILABLE:
        message = "the inference server cannot be reached; try again"
        return ApiError(503, message, code="engine_unavailable", detail=details)
    if code is grpc.StatusCode.CANCELLED:
        return ApiError(499, "the request was cancelled", code="cancelled")
    return ApiError(500, _FAILED, detail=details)
