"""The stub's clock: whose client is looked after, what a drain does, and deadlines."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvforge.serving.contract.failures import SHUTTING_DOWN, Failure
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.processes.run_dir import ask_to_drain
from kvforge.serving.stub import active as active_module
from kvforge.serving.stub import request_watch as module
from kvforge.serving.stub.active import ActiveRequest
from kvforge.serving.stub.open_requests import OpenRequests
from kvforge.serving.stub.request_watch import RequestWatch


class Watched:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ended: list[tuple[int, Failure]] = []

    def on_tick(self) -> None:
        self.calls.append("tick")

    def on_drain(self) -> None:
        self.calls.append("drain")

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


def text_request(
    key: int, timeout_s: float | None = None, lane: int | None = None, sender: object = None
) -> ActiveRequest:
    prompt = GenerationRequest([1], streaming=True, exclude_input=True, params={"n": 1})
    return ActiveRequest(key, "id", sender, [prompt], frozenset(), lane, timeout_s=timeout_s)


def test_clients_are_looked_after_in_turn(pass_time, watch: RequestWatch) -> None:
    """Those of text models are not: the models do."""
    looked: list[int] = []
    for key in range(15):
        sender = SimpleNamespace(is_cancelled=lambda key=key: looked.append(key) or key == 12)
        watch._requests.add(text_request(key, sender=sender))
    watch._requests.add(text_request(15, lane=0))
    for _ in range(3):
        pass_time(1.0)
        watch._look()
    assert looked[:15] == list(range(15)) and len(looked) == 30
    assert [key for key, _ in watch._watched.ended] == [12]


def test_the_state_is_told_after_the_drain_is_seen(pass_time, watch: RequestWatch, tmp_path: Path) -> None:
    watch._requests.add(text_request(5, lane=0))
    ask_to_drain(tmp_path, 10.0)
    watch._look()
    assert watch._watched.calls == ["drain", "tick"] and watch._watched.ended == []
    pass_time(10.0)
    watch._look()
    assert watch._watched.calls == ["drain", "tick", "tick"]
    assert watch._watched.ended == [(5, SHUTTING_DOWN)]


def test_a_deadline_ends_its_own_request(pass_time, watch: RequestWatch) -> None:
    watch._requests.add(text_request(1, 2.0, 0))
    watch._requests.add(text_request(2, 3.0, 0))
    pass_time(2.5)
    watch._look()
    assert [key for key, _ in watch._watched.ended] == [1]
