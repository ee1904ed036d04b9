"""Requests that wait for a thread, in the order they came; one that waits can be taken out again."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger("kvforge.serving")

T = TypeVar("T")


class WaitingRoom(Generic[T]):
    """Threads that run the jobs of guests: at most ``num_threads``, made when first needed. A guest is in the room once
    at a time, from `put` until a thread begins with its job, or `take_out`."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._jobs: OrderedDict[int, tuple[T, Callable[[], None]]] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, guest: T, job: Callable[[], None]) -> None:
        """Have a thread run ``job``, after those of the guests that are here."""
        with self._changed:
            self._jobs[id(guest)] = (guest, job)
            if self._num_idle >= len(self._jobs):
                self._changed.notify()
            elif len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def take_out(self, guest: T, where: Callable[[T], bool] = lambda guest: True) -> bool:
        """Whether the guest was here and ``where`` holds, which is asked while no thread can begin with its job; none
        does then."""
        with self._changed:
            leaves = id(guest) in self._jobs and where(guest)
            if leaves:
                del self._jobs[id(guest)]
            return leaves

    def guests(self) -> list[T]:
        """Who waits, the one that came first at the front."""
        with self._changed:
            return [guest for guest, _ in self._jobs.values()]

    def close(self, timeout_s: float) -> None:
        """Begin no job any more, and wait for those that run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException:  # without its thread the room would serve nobody
                logger.exception("a job failed")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._num_idle += 1
            while not self._jobs and not self._closed:
                self._changed.wait()
            self._num_idle -= 1
            return None if self._closed else self._jobs.popitem(last=False)[1][1]
