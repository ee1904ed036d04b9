"""A text model's end of the connection to the stub of `tensorrt_llm` (contract/text_rows.py)."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvforge.common.errors import EngineError
from kvforge.serving.contract.text_rows import MAX_ROWS_BYTES, TextRow, read_rows
from kvforge.serving.engine.protocol import Message, ProtocolError, encode, receive

logger = logging.getLogger("kvforge.serving")

CONNECT_S = 10.0


class EngineLink:
    """Connects when first needed, and again after the connection was lost. `on_rows` and `on_lost` are called from its
    thread."""

    def __init__(
        self, path: Path, lane: int, on_rows: Callable[[list[TextRow]], None], on_lost: Callable[[], None]
    ) -> None:
        self._path, self._lane = path, lane
        self._on_rows, self._on_lost = on_rows, on_lost
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Make sure of a connection. Raises EngineError where nobody listens."""
        with self._lock:
            if self._sock is not None:
                return
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(self._path))
                sock.settimeout(CONNECT_S)
                sock.sendall(encode({"op": "hello", "lane": self._lane}))
                if receive(sock) is None:
                    raise ConnectionError("it closed the connection")
                sock.settimeout(None)
            except (OSError, ProtocolError) as error:
                sock.close()
                raise EngineError(f"tensorrt_llm cannot be reached ({error}); send the request again later") from None
            self._sock = sock
        threading.Thread(target=self._read, args=(sock,), name="engine-link", daemon=True).start()

    def cancel(self, key: int) -> None:
        """Nobody wants the answer to this request any more. Never raises."""
        self._send({"op": "cancel", "key": key})

    def tell_open(self, num: int) -> None:
        """So many requests are open. Raises EngineError as `connect`."""
        self.connect()
        self._send({"op": "open", "num": num})

    def close(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _send(self, message: Message) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.sendall(encode(message))

    def _read(self, sock: socket.socket) -> None:
        try:
            while (message := receive(sock, MAX_ROWS_BYTES)) is not None:
                self._on_rows(read_rows(message))
        except (OSError, ProtocolError):
            logger.exception("the connection to tensorrt_llm broke")
        except BaseException:  # without this thread no request would ever end
            logger.exception("a message of tensorrt_llm could not be taken in")
        with self._lock:
            if self._sock is sock:
                self._sock = None
            sock.close()
        self._on_lost()
