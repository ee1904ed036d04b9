"""Sender threads: responses leave from here, so that a slow send never holds up who brings the tokens.

A response costs one synchronous exchange with tritonserver (about 140 µs). While a request waits for its
turn, further tokens of it gather.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger("kvforge.serving")


class Scheduled(Protocol):
    """What is sent: `scheduled` is the pool's own."""

    key: int
    scheduled: bool


T = TypeVar("T", bound=Scheduled)


class SenderPool(Generic[T]):
    """`num_threads` threads calling `send(request)`; one request is never in two threads at once."""

    def __init__(self, send: Callable[[T], None], num_threads: int = 3) -> None:
        self._send = send
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._again: set[int] = set()
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def schedule(self, request: T) -> None:
        """Have `request` sent what it has, soon. Cheap and idempotent."""
        with self._lock:
            if request.scheduled:
                self._again.add(request.key)
                return
            request.scheduled = True
        self._queue.put(request)

    def close(self) -> None:
        """Send what is scheduled, then end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            with self._lock:
                self._again.discard(request.key)
            try:
                self._send(request)
            except BaseException:  # a panic of native code too
                logger.exception("sending a response failed")
            with self._lock:
                request.scheduled = request.key in self._again
                again = request.scheduled
            if again:
                self._queue.put(request)
