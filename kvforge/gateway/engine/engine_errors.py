"""How requests end badly behind the gateway, as answers of HTTP. Only what a client can use is said to it."""

from collections.abc import Mapping

import grpc

from kvforge.gateway.client_words import api_error
from kvforge.gateway.errors import ApiError
from kvforge.serving.contract.failures import Failure

_FAILED = "the inference server failed; its log says why"
_NOT_LOADED = ("unknown model", "not ready", "is not healthy", "no available versions", "Server exiting", "stopping")
"""The model is missing or unloaded, its process ended, the server goes down."""


def from_failure(failure: Failure, names: Mapping[str, str]) -> ApiError:
    """How `tensorrt_llm` says that a request ended; `names` are what the request calls fields, see
    kvforge.gateway.client_words."""
    refusal = failure.refusal
    if refusal is not None and (failure.outcome == "refused" or refusal.code is not None):
        return api_error(refusal, names, failure.message)
    status, code, words = _OUTCOMES.get(failure.outcome, (500, None, _FAILED))
    return ApiError(status, words, code=code, detail=failure.message)


_OUTCOMES: dict[str, tuple[int, str | None, str]] = {
    "refused": (400, None, "the request cannot be served as asked; change it"),
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
