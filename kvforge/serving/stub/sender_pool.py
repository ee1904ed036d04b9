"""Sender threads: responses leave from here, so that a slow send never holds up who brings the tokens.

A response costs one synchronous exchange with tritonserver (about 140 µs). While a request waits for its
turn, further tokens of it gather.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger("kvforge.serving")

HUNG_S = 10.0
"""No send takes so long, but one into a tritonserver that has locked itself up (docs/load-testing.md)."""
LOOK_PERIOD_S = 0.5


class Scheduled(Protocol):
    """What is sent: `scheduled` is the pool's own."""

    key: int
    scheduled: bool


T = TypeVar("T", bound=Scheduled)


def end_process() -> None:
    """Nothing that waits for this tritonserver ever ends: the supervisor, who sees this process end, starts another."""
    logger.critical("a response has not left within %g s: tritonserver hangs, this process ends for a restart", HUNG_S)
    logging.shutdown()
    os._exit(1)


class SenderPool(Generic[T]):
    """`num_threads` threads calling `send(request)`; one request is never in two threads at once. A send that takes
    longer than HUNG_S has `on_hung` called, from a thread of its own."""

    def __init__(
        self, send: Callable[[T], None], num_threads: int = 3, on_hung: Callable[[], None] = end_process
    ) -> None:
        self._send = send
        self._on_hung = on_hung
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._again: set[int] = set()
        self._ending = False
        self._sends = [0] * num_threads
        """How often each thread has begun or ended a send: odd within one, also where it has gone on."""
        self._own = threading.local()
        self._watch = SendWatch(self._sends)
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"sender-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._look, name="sender-watch", daemon=True).start()

    def schedule(self, request: T) -> None:
        """Have `request` sent what it has, soon. Cheap and idempotent."""
        with self._lock:
            if request.scheduled:
                self._again.add(request.key)
                return
            request.scheduled = True
        self._queue.put(request)

    def goes_on(self) -> None:
        """Within a send of several responses: one has left."""
        self._sends[self._own.index] += 2

    def close(self) -> None:
        """Send what is scheduled, and what is scheduled again meanwhile, then end the threads."""
        with self._lock:
            self._ending = True
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._closing.set()

    def _run(self, index: int) -> None:
        self._own.index = index
        while (request := self._queue.get()) is not None:
            while self._take_turn(request, index):
                pass

    def _take_turn(self, request: T, index: int) -> bool:
        """Send; True where this thread is to send once more: behind the end of the queue nobody would."""
        with self._lock:
            self._again.discard(request.key)
        self._sends[index] += 1
        try:
            self._send(request)
        except BaseException:  # a panic of native code too
            logger.exception("sending a response failed")
        self._sends[index] += 1
        with self._lock:
            request.scheduled = request.key in self._again
            if request.scheduled and not self._ending:
                self._queue.put(request)
            return request.scheduled and self._ending

    def _look(self) -> None:
        while not self._closing.wait(LOOK_PERIOD_S):
            if self._watch.longest_s(time.monotonic()) > HUNG_S:
                self._on_hung()
                return


class SendWatch:
    """How long sends have been under way; `sends` are those of SenderPool."""

    def __init__(self, sends: list[int]) -> None:
        self._sends = sends
        self._seen = [0] * len(sends)
        self._lasted = [0.0] * len(sends)
        self._looked_at = 0.0

    def longest_s(self, now: float) -> float:
        """Seconds of the longest send that goes on at `now`, of time.monotonic. From one look to the next at most two
        periods count: while this process did not run, nobody knows whether tritonserver could."""
        passed, self._looked_at = min(now - self._looked_at, 2 * LOOK_PERIOD_S), now
        for index, number in enumerate(self._sends):
            same = number == self._seen[index] and number % 2 == 1
            self._seen[index], self._lasted[index] = number, self._lasted[index] + passed if same else 0.0
        return max(self._lasted)
