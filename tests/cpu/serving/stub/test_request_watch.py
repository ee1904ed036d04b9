"""The stub's clock: who gets the next beat, what a drain does, and deadlines."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvforge.serving.contract.failures import SHUTTING_DOWN, Failure
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.engine.output_rows import StepOutput
from kvforge.serving.processes.run_dir import ask_to_drain
from kvforge.serving.stub import active as active_module
from kvforge.serving.stub import request_watch as module
from kvforge.serving.stub.active import ActiveRequest
from kvforge.serving.stub.open_requests import OpenRequests
from kvforge.serving.stub.request_watch import HEARTBEAT_PERIOD_S, SILENCE_S, RequestWatch


class Watched:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.beaten: list[int] = []
        self.ended: list[tuple[int, Failure]] = []

    def on_tick(self) -> None:
        self.calls.append("tick")

    def on_drain(self) -> None:
        self.calls.append("drain")

    def on_silence(self, active: ActiveRequest) -> None:
        self.beaten.append(active.key)

    def end(self, active: ActiveRequest, failure: Failure) -> None:
        self.ended.append((active.key, failure))


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(active_module, "time", clock)

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[RequestWatch]:
    """One whose thread does not look: the tests do."""
    made = RequestWatch(Watched(), OpenRequests(), 1e6, tmp_path)
    yield made
    made.close()


def ensemble_request(key: int, timeout_s: float | None = None) -> ActiveRequest:
    prompt = GenerationRequest([1], streaming=True, exclude_input=True, params={"n": 1})
    return ActiveRequest(key, "id", None, [prompt], frozenset(), in_ensemble=True, timeout_s=timeout_s)


def test_a_request_that_sends_nothing_keeps_no_beat_from_the_others(pass_time, watch: RequestWatch) -> None:
    """One that waits for its ack stays the one silent for longest."""
    for key in range(3):
        watch._requests.add(ensemble_request(key))
    pass_time(SILENCE_S)
    for _ in range(6):
        pass_time(HEARTBEAT_PERIOD_S)
        watch._look()
    assert watch._watched.beaten == [0, 1, 2, 0, 1, 2]


def test_who_has_sent_lately_gets_no_beat(pass_time, watch: RequestWatch) -> None:
    silent, busy = ensemble_request(0), ensemble_request(1)
    watch._requests.add(silent)
    watch._requests.add(busy)
    pass_time(SILENCE_S + 0.1)
    busy.add(StepOutput("1.0", 0, [4], None, None))
    assert busy.take()[0]
    watch._look()
    pass_time(HEARTBEAT_PERIOD_S)
    watch._look()
    assert watch._watched.beaten == [0, 0]


def test_the_state_is_told_after_the_drain_is_seen(pass_time, watch: RequestWatch, tmp_path: Path) -> None:
    watch._requests.add(ensemble_request(5))
    ask_to_drain(tmp_path, 10.0)
    watch._look()
    assert watch._watched.calls == ["drain", "tick"] and watch._watched.ended == []
    pass_time(10.0)
    watch._look()
    assert watch._watched.calls == ["drain", "tick", "tick"]
    assert watch._watched.ended == [(5, SHUTTING_DOWN)]


def test_a_deadline_ends_its_own_request(pass_time, watch: RequestWatch) -> None:
    watch._requests.add(ensemble_request(1, timeout_s=2.0))
    watch._requests.add(ensemble_request(2, timeout_s=3.0))
    pass_time(2.5)
    watch._look()
    assert [key for key, _ in watch._watched.ended] == [1]
