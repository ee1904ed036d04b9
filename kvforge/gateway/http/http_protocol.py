"""uvicorn's HTTP protocol with limits it does not have: on connections, on the time a request's head takes, on what is
worked on at once."""

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvforge.gateway.http.http_pacing import PacedConnection, PacedFlow


def limited_protocol(header_timeout_s: float, max_connections: int) -> type[H11Protocol]:
    """A protocol class that closes a connection without a whole request head after `header_timeout_s`, counted from
    its beginning or the end of the last answer's keep-alive, and any connection above `max_connections`.

    Applications find `abort` in scope["state"]: it drops the connection and what is still to be written.
    """

    class LimitedProtocol(H11Protocol):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._head_timer: asyncio.TimerHandle | None = None
            self.conn: PacedConnection = PacedConnection(self._on_pause)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow = PacedFlow(transport, self.conn)
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

        def _on_pause(self) -> None:
            self.flow.pause_reading()
            self.loop.call_soon(self._go_on)

        def _go_on(self) -> None:
            if self.transport.is_closing():
                return
            self.conn.go_on()
            self.handle_events()
            if self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
                self.flow.resume_reading()

        def send_400_response(self, msg: str) -> None:
            super().send_400_response(self.conn.refusal or msg)

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
