"""Long texts wait for texts of their own order of length, short ones for none; the wait is bounded."""

import threading

import pytest

from kvforge.serving.contract.failures import UnavailableError
from kvforge.serving.text_models.lanes import LANE_BYTES, SHORT_BYTES, TextLanes

WAIT_S = 60.0
MIDDLE, LONG, LONGEST = SHORT_BYTES + 1, LANE_BYTES[0] + 1, LANE_BYTES[1] + 1


def test_a_lane_that_is_busy_holds_up_no_other() -> None:
    lanes, go_on = TextLanes(), threading.Event()
    num_held = 100
    for _ in range(num_held):
        assert lanes.take(LONG, lambda: go_on.wait(WAIT_S) and None)
    for size in (MIDDLE, LONGEST):
        done = threading.Event()
        assert lanes.take(size, done.set)
        assert done.wait(WAIT_S)
    assert not lanes.take(SHORT_BYTES, lambda: None)
    assert not go_on.is_set()
    go_on.set()
    lanes.close()
    assert lanes._num_bytes == 0


def test_what_waits_is_bounded_but_one_text_is_always_taken() -> None:
    lanes, go_on = TextLanes(waiting_bytes=2 * MIDDLE), threading.Event()
    assert lanes.take(LONGEST, lambda: go_on.wait(WAIT_S) and None)
    with pytest.raises(UnavailableError, match="send the request again later"):
        lanes.take(MIDDLE, lambda: None)
    go_on.set()
    done = threading.Event()
    while not done.is_set():
        try:
            lanes.take(MIDDLE, done.set)
        except UnavailableError:
            continue
        assert done.wait(WAIT_S)
    lanes.close()


def test_a_job_that_fails_leaves_the_lane_working(caplog: pytest.LogCaptureFixture) -> None:
    lanes, done = TextLanes(), threading.Event()

    def fail() -> None:
        raise SystemExit("a job's end")

    assert lanes.take(MIDDLE, fail)
    assert lanes.take(MIDDLE, done.set)
    assert done.wait(WAIT_S)
    lanes.close()
    assert "was not answered" in caplog.text
    assert lanes._num_bytes == 0


def test_a_closed_lane_refuses() -> None:
    lanes = TextLanes()
    lanes.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        lanes.take(MIDDLE, lambda: None)
    assert lanes._num_bytes == 0
