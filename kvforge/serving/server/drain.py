"""Lets a server's accepted requests finish before it is ended."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from kvforge.serving.health.probe import read_metrics
from kvforge.serving.processes.run_dir import HUNG_AFTER_S, StateReader, ask_to_drain

POLL_S = 0.05
NOTICE_TIMEOUT_S = 5.0
"""What the stub gets to say that it drains; it looks every few ten milliseconds."""
TEXT_NOTICE_S = 0.2
"""The text models look every 50 ms; by then they have told the stub of the requests that wait with them."""
STUB_GRACE_S = 5.0
"""What the stub gets beyond the deadline to send its errors."""
SETTLED_S = 0.25
IDLE_FRACTION = 0.02
"""Of a core: what tritonserver needs at most with nothing to send. Responses that a client has not read yet wait in
tritonserver, which counts their requests as ended."""
SETTLE_TIMEOUT_S = 5.0
"""At least, or the rest of the drain's time."""
ANSWERED = ("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_exec_count")


def drain(
    run_dir: Path,
    state: StateReader,
    metrics_url: str,
    timeout_s: float,
    hurry: Callable[[], bool] = lambda: False,
    server_cpu_s: Callable[[], float] = lambda: 0.0,
) -> bool:
    """Refuse new requests and wait until no request is open; after `timeout_s`, or once `hurry()`, the stub ends
    those left with an error. True when none was left without an answer. `server_cpu_s` says how long tritonserver has
    computed so far.

    tritonserver's own SIGTERM does not do: it closes all HTTP connections at once, and unloads models that work.
    """
    first = state.read()
    if first is None:
        return False
    try:
        ask_to_drain(run_dir, timeout_s)
    except OSError:  # a full disk: nobody can be told
        return False
    _wait_noticed(state)
    time.sleep(TEXT_NOTICE_S)
    idle = first.active == 0 and _open_requests(state) == 0
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not hurry() and _open_requests(state):
        time.sleep(POLL_S)
    if _open_requests(state):
        with contextlib.suppress(OSError):
            ask_to_drain(run_dir, 0.0)
    give_up = time.monotonic() + STUB_GRACE_S
    while (left := _open_requests(state)) and time.monotonic() < give_up:
        time.sleep(POLL_S)
    if not idle and not hurry():
        _wait_settled(metrics_url, server_cpu_s, max(deadline, time.monotonic() + SETTLE_TIMEOUT_S), hurry)
    return left == 0


def _wait_noticed(state: StateReader) -> None:
    """Wait until the stub lets nobody in: what it counts from then on is all that it accepted. One that hangs counts
    nothing."""
    deadline = time.monotonic() + NOTICE_TIMEOUT_S
    while (found := state.read()) is not None and not found.draining and time.monotonic() < deadline:
        if found.age_s > HUNG_AFTER_S:
            return
        time.sleep(POLL_S)


def _open_requests(state: StateReader) -> int | None:
    """None once nobody can tell, because the stub is gone or hangs."""
    found = state.read()
    return None if found is None or found.age_s > HUNG_AFTER_S else found.active


def _wait_settled(
    metrics_url: str, server_cpu_s: Callable[[], float], deadline: float, hurry: Callable[[], bool]
) -> None:
    """Wait until the last responses are out: no count of answers changes any more, and tritonserver is idle."""
    previous: dict[str, float] | None = None
    with contextlib.suppress(OSError, ValueError):
        while time.monotonic() < deadline and not hurry():
            used_s = server_cpu_s()
            time.sleep(SETTLED_S)
            is_idle = server_cpu_s() - used_s <= IDLE_FRACTION * SETTLED_S
            counts = {
                name: value
                for name, value in read_metrics(metrics_url, SETTLE_TIMEOUT_S).items()
                if name.startswith(ANSWERED)
            }
            if counts == previous and is_idle:
                return
            previous = counts
