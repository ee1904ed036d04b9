"""The stub's clock: every few ten milliseconds it looks for clients that cancelled, deadlines, and the drain file."""

import logging
import threading
import time
from pathlib import Path
from typing import Protocol

from kvforge.serving.contract.failures import CANCELLED, SHUTTING_DOWN, Failure, past_deadline
from kvforge.serving.processes.state_files import DrainClock
from kvforge.serving.stub.active import ActiveRequest
from kvforge.serving.stub.open_requests import OpenRequests

logger = logging.getLogger("kvforge.serving")

MAX_LOOKS_PER_TICK = 10
"""A question to Triton whether a direct request is cancelled costs 60 µs; those not asked longest come first."""


class Watched(Protocol):
    """Who is told; all calls come from the watch's one thread."""

    def on_tick(self) -> None: ...
    def on_drain(self) -> None:
        """The drain file is there: called once."""

    def end(self, active: ActiveRequest, failure: Failure) -> None: ...


class RequestWatch:
    """Looks every `period_s`, from a thread of its own."""

    def __init__(self, watched: Watched, requests: OpenRequests, period_s: float, run_dir: Path) -> None:
        self._watched, self._requests, self._period_s = watched, requests, period_s
        self._drain = DrainClock(run_dir)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                self._look()
            except BaseException:  # a panic of native code too
                logger.exception("looking after the open requests failed")

    def _look(self) -> None:
        now = time.monotonic()
        was_asked, drained = self._drain.asked, self._drain.look(now)
        if self._drain.asked and not was_asked:
            self._watched.on_drain()
        self._watched.on_tick()
        requests = self._requests.all()
        for request in requests:
            if drained:
                self._watched.end(request, SHUTTING_DOWN)
            elif request.is_past_deadline(now):
                self._watched.end(request, past_deadline(request.timeout_s or 0.0))
        self._ask([a for a in requests if a.lane is None], now)  # text models look after their own clients

    def _ask(self, direct: list[ActiveRequest], now: float) -> None:
        for request in sorted(direct, key=lambda a: a.last_asked)[:MAX_LOOKS_PER_TICK]:
            request.last_asked = now
            if is_cancelled(request):
                self._watched.end(request, CANCELLED)


def is_cancelled(active: ActiveRequest) -> bool:
    with active.sender_lock:
        return not active.closed and active.sender.is_cancelled()
