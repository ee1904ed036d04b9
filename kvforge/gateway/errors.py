"""Errors as OpenAI's clients expect them: a status and {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Callable, Mapping
from typing import Any

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
    """An answer that is an error. `param` names the field of the request, `code` is for programs, `detail` is for the
    log only. `what` is the message without the field's name, where it begins with that."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        detail: str | None = None,
        what: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} …"
        self.param = param
        self.code = code
        self.detail = detail
        self.what = what

    def renamed(self, param: str, called: str, named: Callable[[str], str] = str) -> "ApiError":
        """The same of a field that the client knows as `param`, and that the message calls `called`; `named` puts the
        client's names into the rest of the message."""
        message = named(self.message) if self.what is None else f"{called} {named(self.what)}"
        return ApiError(self.status, message, param, self.code, self.detail, self.what)

    @property
    def logged(self) -> str:
        """The message and the detail."""
        return self.message if self.detail is None else f"{self.message} ({self.detail[:MAX_MESSAGE]})"

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def too_deep() -> ApiError:
    """Of a request whose values stand in each other beyond what Python follows."""
    return ApiError(400, "the request is nested too deeply; flatten it")


def bad_field(param: str, what: str, code: str | None = None, detail: str | None = None) -> ApiError:
    """A field that cannot be used; `what` follows its name."""
    return ApiError(400, f"'{param}' {what}", param, code, detail, what)
