"""The stub's end of the connections to text models (contract/text_rows.py)."""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvforge.serving.contract.text_rows import MAX_ROWS_BYTES, RowMessage
from kvforge.serving.engine.protocol import ProtocolError, encode, encode_head, receive

logger = logging.getLogger("kvforge.serving")


class TextLinks:
    """Listens at the socket `path`. `on_cancel(key)`, and `on_gone(lane)` when a connection ended, are called from the
    connections' threads. Nothing that is sent ever waits for a text model."""

    def __init__(self, path: Path, on_cancel: Callable[[int], None], on_gone: Callable[[int], None]) -> None:
        self._path = path
        self._on_cancel, self._on_gone = on_cancel, on_gone
        self._links: dict[int, _Link] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="text-links", daemon=True).start()

    def has(self, lane: int) -> bool:
        """Whether the text model with this lane of keys is connected."""
        return lane in self._links

    def num_open(self, known: Mapping[int, int]) -> int:
        """How many requests the text models have let in. ``known`` of each lane came here, others wait there."""
        said = {lane: link.num_open for lane, link in tuple(self._links.items())}
        return sum(max(said.get(lane, 0), known.get(lane, 0)) for lane in said.keys() | known.keys())

    def send(self, lane: int, rows: RowMessage) -> None:
        """Queue the rows; for a connection that has ended they are dropped."""
        link = self._links.get(lane)
        if link is not None:
            link.send(rows)

    def close(self) -> None:
        """Send what is queued and end the connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for link in tuple(self._links.values()):
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(sock,), name="text-link", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        lane = None
        link = _Link(sock)
        try:
            while (message := receive(sock)) is not None:
                if message["op"] == "hello":
                    if lane is not None or self._links.setdefault(int(message["lane"]), link) is not link:
                        raise ProtocolError("this lane has a connection")
                    lane = int(message["lane"])
                    sock.sendall(encode({"op": "welcome"}))  # before any row: none is sent for requests yet to come
                elif message["op"] == "open":
                    link.num_open = int(message["num"])
                elif message["op"] == "cancel":
                    self._on_cancel(int(message["key"]))
        except (OSError, ProtocolError):
            logger.exception("the connection to a text model broke")
        except BaseException:  # without this thread the model's requests would never end
            logger.exception("word from a text model could not be taken in")
        if lane is not None and self._links.get(lane) is link:
            del self._links[lane]
            self._on_gone(lane)
        link.close()


class _Link:
    """One connection and the thread that writes to it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.num_open = 0
        self._outgoing: queue.SimpleQueue[RowMessage | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="text-link-writer", daemon=True)
        self._thread.start()

    def send(self, rows: RowMessage) -> None:
        self._outgoing.put(rows)

    def close(self) -> None:
        self._outgoing.put(None)
        self._thread.join(timeout=5.0)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (rows := self._outgoing.get()) is not None:
                self._sock.sendall(encode_head(rows.message, rows.num_bytes, MAX_ROWS_BYTES))
                for blob in rows.blobs:
                    self._sock.sendall(blob)
        # A text model that does not read any more has its requests ended by the connection's reader.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
