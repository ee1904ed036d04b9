"""uvicorn's HTTP protocol with limits it does not have: on connections and on the time a request's head takes."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def limited_protocol(header_timeout_s: float, max_connections: int) -> type[H11Protocol]:
    """A protocol class that closes a connection without a whole request head after `header_timeout_s`, counted from
    its beginning or the end of the last answer's keep-alive, and any connection above `max_connections`.

    Applications find `abort` in scope["state"]: it drops the connection and what is still to be written.
    """

    class LimitedProtocol(H11Protocol):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, "abort": transport.abort}
            if len(self.connections) > max_connections:
                transport.abort()
            else:
                self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._head_timer is None:
                self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(header_timeout_s, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return LimitedProtocol
