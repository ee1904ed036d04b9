"""However many requests come at once, those that run get their steps between them."""

import socket

import pytest

from kvforge.serving.engine import process as engine_process
from kvforge.serving.engine.guide_thread import GuideThread
from kvforge.serving.engine.process import COMMANDS_S, EngineServer

NUM_ADDS = 10


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class SlowToAdd:
    """Adding a request takes a time of its own, on the test's clock."""

    def __init__(self, clock: Clock, add_s: float) -> None:
        self.clock, self.add_s, self.added = clock, add_s, 0

    def add_request(self, *_: object) -> None:
        self.clock.now += self.add_s
        self.added += 1

    def has_unfinished(self) -> bool:
        return self.added > 0


@pytest.mark.parametrize("add_s, rounds", [(COMMANDS_S * 1.5, NUM_ADDS), (COMMANDS_S * 0.75, NUM_ADDS // 2), (0.0, 1)])
def test_adds_leave_time_for_steps(monkeypatch: pytest.MonkeyPatch, add_s: float, rounds: int) -> None:
    clock = Clock()
    engine = SlowToAdd(clock, add_s)
    monkeypatch.setattr(engine_process, "time", clock)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = EngineServer(theirs, lambda: engine, lambda fields: fields)
        guides = GuideThread(lambda _: None, lambda _: None, server._commands.put, server._refuse)
        for number in range(NUM_ADDS):
            server._commands.put({"op": "add", "id": str(number), "prompt": [1], "params": {}})
        taken = 0
        while not server._commands.empty():
            assert server._handle_commands(engine, guides)
            taken += 1
    assert (taken, engine.added) == (rounds, NUM_ADDS)
