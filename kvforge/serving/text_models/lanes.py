"""Threads for long texts, so that short ones never wait behind them.

A text waits only for texts of its own order of length. Tokenizing lets other threads run, so the thread that Triton
calls goes on with the short ones meanwhile.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvforge.common.refusals import SERVER_ENDS, Refusal
from kvforge.serving.contract.failures import UnavailableError

logger = logging.getLogger("kvforge.serving")

SHORT_BYTES = 1 << 12
LANE_BYTES = (1 << 16, 1 << 20)
"""Up to so many go to the first lane, up to so many to the second, more to the last."""
WAITING_BYTES = 1 << 28
MAX_THREADS = 4
CLOSE_S = 5.0


class TextLanes:
    """Runs jobs with long texts. `waiting_bytes` bounds those that wait or run; a single one is always taken."""

    def __init__(self, waiting_bytes: int = WAITING_BYTES) -> None:
        self._waiting_bytes = waiting_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 4))
        # A text of the last lane may take a gigabyte while it is tokenized.
        self._pools = [ThreadPoolExecutor(n, f"texts-{lane}") for lane, n in enumerate((threads, threads, 1))]

    def take(self, num_bytes: int, job: Callable[[], None]) -> bool:
        """Have a thread run `job`, which answers its request whatever happens; False for a short text, whose job the
        caller runs. Raises UnavailableError where too much waits."""
        if num_bytes <= SHORT_BYTES:
            return False
        with self._lock:
            if self._num_bytes and self._num_bytes + num_bytes > self._waiting_bytes:
                said = (
                    f"long texts of {self._num_bytes} bytes are waiting to be tokenized, and at most "
                    f"{self._waiting_bytes} may"
                )
                raise UnavailableError(Refusal(said, "send the request again later"))
            self._num_bytes += num_bytes
        lane = sum(num_bytes > bound for bound in LANE_BYTES)
        try:
            self._pools[lane].submit(self._run, num_bytes, job)
        except RuntimeError:  # closed
            self._leave(num_bytes)
            raise UnavailableError(SERVER_ENDS) from None
        return True

    def close(self) -> None:
        """Finish what waits, for some seconds at most."""
        closing = [threading.Thread(target=pool.shutdown, daemon=True) for pool in self._pools]
        for thread in closing:
            thread.start()
        end = time.monotonic() + CLOSE_S
        for thread in closing:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, num_bytes: int, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException:
            logger.exception("a request with a long text was not answered")
        finally:
            self._leave(num_bytes)

    def _leave(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
