"""Lets a server's accepted requests finish before it is ended."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from kvforge.serving.health import read_metrics
from kvforge.serving.run_dir import StateReader, ask_to_drain

POLL_S = 0.05
NOTICED_S = 0.2
"""After this the stub has seen the request to drain: what it counts from then on is all that it accepted."""
STUB_GRACE_S = 1.0
"""What the stub gets beyond the deadline to send its errors."""
SETTLED_S = 0.15
SETTLE_TIMEOUT_S = 2.0
ANSWERED = ("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_exec_count")


def drain(
    run_dir: Path, state: StateReader, metrics_url: str, timeout_s: float, hurry: Callable[[], bool] = lambda: False
) -> bool:
    """Refuse new requests and wait until no request is open; after `timeout_s`, or once `hurry()`, the stub ends
    those left with an error. True when none was left without an answer.

    tritonserver's own SIGTERM does not do: it closes all HTTP connections at once, and unloads models that work.
    """
    first = state.read()
    if first is None:
        return False
    ask_to_drain(run_dir, timeout_s)
    time.sleep(NOTICED_S)
    idle = first.active == 0 and _open_requests(state) == 0
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not hurry() and _open_requests(state):
        time.sleep(POLL_S)
    if _open_requests(state):
        ask_to_drain(run_dir, 0.0)
    give_up = time.monotonic() + STUB_GRACE_S
    while (left := _open_requests(state)) and time.monotonic() < give_up:
        time.sleep(POLL_S)
    if not idle and not hurry():
        _wait_settled(metrics_url)
    return left == 0


def _open_requests(state: StateReader) -> int | None:
    """None once nobody can tell, because the stub is gone or hangs."""
    found = state.read()
    return None if found is None or found.age_s > 5.0 else found.active


def _wait_settled(metrics_url: str) -> None:
    """Wait until the last responses are through postprocessing and out: no count of answers changes any more."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    previous: dict[str, float] | None = None
    with contextlib.suppress(OSError, ValueError):
        while time.monotonic() < deadline:
            counts = {name: value for name, value in read_metrics(metrics_url).items() if name.startswith(ANSWERED)}
            if counts == previous:
                return
            previous = counts
            time.sleep(SETTLED_S)
