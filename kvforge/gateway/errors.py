"""Errors as OpenAI's clients expect them: a status and {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Mapping
from typing import Any

import grpc

from kvforge.common.errors import RequestError

MAX_MESSAGE = 600
RETRY_AFTER_S = 1

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error. `param` names the field of the request, `code` is for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} …"
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def bad_field(param: str, what: str) -> ApiError:
    """A field that cannot be used; `what` follows its name."""
    return ApiError(400, f"'{param}' {what}", param)


def from_request_error(error: RequestError, names: Mapping[str, str]) -> ApiError:
    """A refusal of kvforge.runtime as a 400; its first word is the parameter, called as in `names` by clients."""
    message = str(error)
    word = message.split(" ", 1)[0]
    name = names.get(word)
    return ApiError(400, message if name is None else f"'{name}'{message[len(word) :]}", name)


def from_outcome(outcome: str, message: str) -> ApiError:
    """How `tensorrt_llm` says that a request ended (kvforge.serving.contract.failures), as an HTTP status."""
    if outcome == "unavailable" and "queue is full" in message:
        return ApiError(429, message, code="queue_full")
    status, code = _OUTCOMES.get(outcome, (500, None))
    return ApiError(status, f"the inference server failed: {message}" if status == 500 else message, code=code)


_OUTCOMES: dict[str, tuple[int, str | None]] = {
    "refused": (400, None),
    "unavailable": (503, "engine_unavailable"),
    "lost": (503, "engine_unavailable"),
    "deadline": (504, "deadline_exceeded"),
    "cancelled": (499, "cancelled"),
}


def from_triton_error(message: str) -> ApiError:
    """What Triton itself says where the model is not there to answer; of its errors a stream carries only the words."""
    if any(words in message for words in _NOT_LOADED):
        return ApiError(503, f"the engine is not loaded: {message}", code="engine_unavailable")
    return ApiError(500, f"the inference server failed: {message}")


_NOT_LOADED = ("unknown model", "not ready", "is not healthy", "no available versions", "Server exiting", "stopping")
"""The model is missing or unloaded, its process ended, the server goes down."""


def from_rpc_error(code: grpc.StatusCode, details: str) -> ApiError:
    """The stream itself broke, or nothing answers."""
    if code is grpc.StatusCode.UNAVAILABLE:
        unreachable = "failed to connect" in details or "Socket closed" in details or "recvmsg" in details
        message = "the inference server cannot be reached; try again" if unreachable else details
        return ApiError(503, message, code="engine_unavailable")
    if code is grpc.StatusCode.CANCELLED:
        return ApiError(499, "the request was cancelled", code="cancelled")
    return ApiError(500, f"the inference server failed: {details}")
