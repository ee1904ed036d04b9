"""Messages that wait for the engine process: bounded in bytes, because a process that does not read lets them grow."""

import threading
from collections import deque

from kvforge.common.errors import EngineError

MAX_BYTES = 512 << 20
"""What honest requests do not reach: those that may be open at once have some hundred kilobytes each."""


class EngineQueue:
    """First in, first out; any thread puts, one gets."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self._ended = False
        self._changed = threading.Condition()

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages that wait."""
        return self._num_bytes

    def put(self, message: bytes, always: bool = False) -> None:
        """Raises EngineError when it does not fit any more, unless `always` or nothing else waits."""
        with self._changed:
            if not always and self._messages and self._num_bytes + len(message) > self._max_bytes:
                raise EngineError(
                    "the engine is behind with the requests it has been sent; send the request again later"
                )
            self._messages.append(message)
            self._num_bytes += len(message)
            self._changed.notify()

    def get(self) -> bytes | None:
        """The next message, once there is one; None after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._ended)
            if self._ended:
                return None
            message = self._messages.popleft()
            self._num_bytes -= len(message)
            return message

    def clear(self) -> None:
        """Forget all messages that wait."""
        with self._changed:
            self._messages.clear()
            self._num_bytes = 0

    def end(self) -> None:
        """Nothing is got any more."""
        with self._changed:
            self._ended = True
            self._changed.notify()
