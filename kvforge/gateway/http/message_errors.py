"""Errors as Anthropic's clients expect them: {"type": "error", "error": {"type", "message"}, "request_id"}, and a code
in the error's details where there is one."""

from collections.abc import Mapping
from typing import Any

from kvforge.gateway.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STATUSES = {503: 529}
"""Anthropic's number for a server that cannot take requests at the moment."""


class MessagesErrors:
    """An ErrorFace, see kvforge.gateway.http.error_faces."""

    def status(self, error: ApiError) -> int:
        return _STATUSES.get(error.status, error.status)

    def body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        kind = _TYPES.get(error.status, "invalid_request_error")
        found: dict[str, Any] = {"type": kind, "message": error.message}
        if error.code is not None:
            found["details"] = {"error_code": error.code}
        return {"type": "error", "error": found, "request_id": request_id}

    def headers(self, request_id: str) -> Mapping[str, str]:
        """Where Anthropic's client looks for the id."""
        return {"request-id": request_id}

    def event(self, data: str) -> str:
        return f"event: error\ndata: {data}\n\n"
