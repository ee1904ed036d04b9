"""Word from `postprocessing` back to `tensorrt_llm`: this response is through, and its client is or is not there.

Triton's ensemble scheduler handles two responses of one step in two threads when they come close together;
then pieces change places, or the end of the stream is lost and the request never ends. So the stub sends a
request's next response only after the last one came through postprocessing. Tokens that come meanwhile
gather and leave together, which is also the backpressure that the ensemble lacks.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("kvforge.serving")

_ACK = struct.Struct("<qB")


class AckListener:
    """Calls `on_ack(stream_key, cancelled)` from a thread for every datagram at the socket `path`."""

    def __init__(self, path: str, on_ack: Callable[[int, bool], None]) -> None:
        self._path = path
        self._on_ack = on_ack
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._run, name="acks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the socket."""
        AckSender(self._path).send(-1, False)
        self._thread.join(timeout=5.0)
        self._socket.close()
        Path(self._path).unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            key, cancelled = _ACK.unpack(self._socket.recv(_ACK.size))
            if key < 0:
                return
            try:
                self._on_ack(key, bool(cancelled))
            except BaseException:  # without this thread no text request would go on
                logger.exception("word from postprocessing could not be taken in")


class AckSender:
    """The other end, in postprocessing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def send(self, key: int, cancelled: bool) -> None:
        """Tell the stub. Lost when nobody listens: the stub then goes on by itself after a while."""
        with contextlib.suppress(OSError):
            self._socket.sendto(_ACK.pack(key, cancelled), self._path)

    def close(self) -> None:
        self._socket.close()
