"""Which words and numbers a client gets an error in: OpenAI's, or Anthropic's where the client speaks that."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from kvforge.gateway.errors import ApiError
from kvforge.gateway.http.message_errors import MessagesErrors

MESSAGES = "/v1/messages"
"""The path of Anthropic's endpoint, with others below it."""
VERSION_HEADER = b"anthropic-version"
"""What every client of Anthropic's sends, on all paths."""


class ErrorFace(Protocol):
    """How one protocol writes an error."""

    def status(self, error: ApiError) -> int:
        """Of HTTP."""

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """As JSON has it."""

    def headers(self, request_id: str) -> Mapping[str, str]:
        """Of every answer, errors or not, beside those of all faces."""

    def event(self, data: str) -> str:
        """The last event of a stream that ends with an error; `data` is its body."""


class OpenAiErrors:
    """As kvforge.gateway.errors has them."""

    def status(self, error: ApiError) -> int:
        return error.status

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        return error.body

    def headers(self, request_id: str) -> Mapping[str, str]:
        return {}

    def event(self, data: str) -> str:
        return f"data: {data}\n\n"


_OPENAI, _MESSAGES = OpenAiErrors(), MessagesErrors()


def speaks_messages(scope: Scope) -> bool:
    """Whether a request is of a client of Anthropic's API."""
    path = scope["path"]
    return (
        path == MESSAGES
        or path.startswith(f"{MESSAGES}/")
        or any(name == VERSION_HEADER for name, _ in scope["headers"])
    )


def face_of(scope: Scope) -> ErrorFace:
    """The face of a request's errors."""
    return _MESSAGES if speaks_messages(scope) else _OPENAI


def error_response(error: ApiError, scope: Scope) -> Response:
    """An error in place of an answer."""
    face = face_of(scope)
    return JSONResponse(face.body(error, scope["request_id"]), face.status(error), headers=dict(error.headers))


def error_event(error: ApiError, scope: Scope) -> bytes:
    """An error within a stream, which it ends."""
    face = face_of(scope)
    return face.event(json.dumps(face.body(error, scope["request_id"]))).encode()
