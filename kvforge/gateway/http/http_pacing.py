"""h11's connection with bounds it does not have: on heads, on what chunks cost, and on events a turn of the loop."""

from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl

MAX_HEAD_BYTES = 16 * 1024
"""Of a request line and its headers, each of which takes microseconds."""
EVENTS_AT_ONCE = 256
"""Of a connection, before others get their turn: a chunk takes 20 microseconds, however short."""
FREE_CHUNKS, BYTES_PER_CHUNK = 4096, 64
"""A body may have so many chunks, and one more for so many bytes of it."""


class PacedConnection(h11.Connection):
    """Says NEED_DATA after EVENTS_AT_ONCE events and calls `on_pause`; events come again after `go_on`.

    A head that is too long, a body of too many chunks, and a length given in two ways raise RemoteProtocolError;
    `refusal` then says why.
    """

    def __init__(self, on_pause: Callable[[], object]) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._on_pause = on_pause
        self._num_events = 0
        self._num_chunks = 0
        self._num_bytes = 0
        self.paused = False
        self.refusal = ""

    def go_on(self) -> None:
        self._num_events = 0
        self.paused = False

    def next_event(self) -> Any:
        if self.paused:
            return h11.NEED_DATA
        if self._num_events >= EVENTS_AT_ONCE:
            self.paused = True
            self._on_pause()
            return h11.NEED_DATA
        if self.their_state is h11.IDLE:
            self._check_head()
        event = super().next_event()
        self._num_events += 1
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                self._refuse("The request has both Content-Length and Transfer-Encoding; send one of them.")
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // BYTES_PER_CHUNK:
                self._refuse("The request's body has too many small chunks; send longer ones.")
        elif event is h11.NEED_DATA or event is h11.PAUSED:
            self._num_events = 0
        return event

    def _check_head(self) -> None:
        """h11 itself looks only at heads that are not complete."""
        start = self.trailing_data[0][: MAX_HEAD_BYTES + 1]
        if len(start) > MAX_HEAD_BYTES and b"\n\r\n" not in start and b"\n\n" not in start:
            self._refuse(f"The request's head is longer than {MAX_HEAD_BYTES} bytes; shorten its headers.")

    def _refuse(self, why: str) -> None:
        self.refusal = why
        raise h11.RemoteProtocolError(why)


class PacedFlow(FlowControl):
    """Reads nothing from a connection that is paused, whoever asks: what arrives faster than it is worked on stays with
    the client."""

    def __init__(self, transport: Any, connection: PacedConnection) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.paused:
            super().resume_reading()
