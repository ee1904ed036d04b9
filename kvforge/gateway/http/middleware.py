"""What every request passes first: its id, the API key, the limit on open requests; and at the end, a log line."""

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvforge.gateway.errors import ApiError
from kvforge.gateway.http.auth import ApiKeys
from kvforge.gateway.http.error_faces import error_response, face_of

logger = logging.getLogger("kvforge.gateway")

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Need no key, count for no limit: for those who watch the server."""
UNLOGGED_PATHS = frozenset({"/page/metrics"})
"""Asked once a second by every page that is open."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Front:
    """ASGI middleware. `counts` are finished requests by (path, status); `num_open` those on their way.

    `draining` makes it refuse new requests with 503.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        max_requests: int,
        cors_origin: str | None = None,
        open_paths: Set[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_requests = max_requests
        self._cors_origin = cors_origin
        self._open_paths = open_paths
        self.counts: Counter[tuple[str, int]] = Counter()
        self.num_open = 0
        self.draining = False
        self._ends: set[Callable[[ApiError], None]] = set()

    def end_all(self) -> None:
        """End all open answers with an error."""
        for end in list(self._ends):
            end(ApiError(503, "the server is shutting down", code="shutting_down"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        shown = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = shown if _ID.fullmatch(shown) else secrets.token_hex(12)
        scope["request_id"] = request_id
        scope["ends"] = self._ends
        log: dict[str, Any] = scope.setdefault("log", {})
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {"x-request-id": request_id, **face_of(scope).headers(request_id)}
                added = [(name.encode(), value.encode()) for name, value in own.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        watched = scope["path"] in self._open_paths
        refusal = None if watched else self._refusal(scope, headers)
        self.num_open += not watched
        try:
            if refusal is not None:
                response = error_response(refusal, scope)
                if self._cors_origin is not None:
                    # The middleware that adds it lies behind; without it a web page cannot read why.
                    response.headers["Access-Control-Allow-Origin"] = self._cors_origin
                await response(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            self.num_open -= not watched
            if not watched and scope["path"] not in UNLOGGED_PATHS:
                self._record(scope, request_id, status, time.perf_counter() - started, log)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        preflight = scope["method"] == "OPTIONS"
        shown = next((shown for shown in _shown_keys(headers) if self._keys.allow(shown)), None)
        if not preflight and shown is None:
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        scope["draft_scope"] = self._keys.draft_scope(shown or "")
        if self.draining:
            return ApiError(503, "the server is shutting down", code="shutting_down")
        if self.num_open >= self._max_requests:
            return ApiError(429, f"{self.num_open} requests are open, the most there may be", code="too_many_requests")
        return None

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float, log: dict[str, Any]) -> None:
        route = scope.get("route")
        self.counts[(route.path if route is not None else "other", status or 499)] += 1
        if logger.isEnabledFor(logging.INFO):
            fields = {
                "id": request_id,
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"],
                "path": scope["path"],
                "status": status or 499,
                "total_ms": round(seconds * 1e3, 2),
                **log,
            }
            logger.info("request", extra={"fields": fields})

    def metrics(self) -> str:
        """The counts in Prometheus' text format."""
        lines = ["# TYPE kvforge_gateway_requests_total counter"]
        for (path, status), count in sorted(self.counts.items()):
            lines.append(f'kvforge_gateway_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += ["# TYPE kvforge_gateway_open_requests gauge", f"kvforge_gateway_open_requests {self.num_open}"]
        return "\n".join(lines) + "\n"


def _shown_keys(headers: dict[bytes, bytes]) -> Iterator[str]:
    """The keys that a request shows, each as `Authorization` has it: there, or as Anthropic's clients do."""
    yield headers.get(b"authorization", b"").decode("latin-1")
    if (key := headers.get(b"x-api-key")) is not None:
        yield f"Bearer {key.decode('latin-1')}"
