"""Draining, with a stub played by a thread: who is waited for, for how long, and what ends the wait."""

import errno
import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.serving.processes.facts import cpu_s
from kvforge.serving.processes.run_dir import DRAIN_FILE, StateReader, ask_to_drain
from kvforge.serving.processes.state_files import StateWriter, drain_deadline
from kvforge.serving.server import drain as drain_module
from kvforge.serving.server.drain import ANSWERED, drain

NO_METRICS = "http://127.0.0.1:9/metrics"


class FakeStub:
    """Writes its state like the real one. One request is open for `seconds` after the drain file appeared, or until
    the file's deadline. It says so only `late_s` after the file appeared, and that it lets nobody in."""

    def __init__(self, run_dir: Path, seconds: float, heeds_deadline: bool = True, late_s: float = 0.0) -> None:
        self.run_dir, self.seconds, self.heeds_deadline = run_dir, seconds, heeds_deadline
        self.late_s, self.ended = late_s, False
        self.deadlines: list[float] = []
        self._end = threading.Event()
        self._state = StateWriter(run_dir)
        self._state.write("ready", 1, int(not late_s))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        active, seen_at = 1, 0.0
        while not self._end.wait(0.01):
            deadline = drain_deadline(self.run_dir)
            if deadline is not None:
                now = time.monotonic()
                if not self.deadlines or self.deadlines[-1] != deadline:
                    self.deadlines.append(deadline)
                    until = now + deadline
                seen_at = seen_at or now
                if now >= seen_at + self.seconds or (self.heeds_deadline and now >= until):
                    active = 0
            if not self.late_s or (seen_at and time.monotonic() >= seen_at + self.late_s):
                self.ended = active == 0
                self._state.write("ready", 1, active, draining=deadline is not None)

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[list[FakeStub]]:
    made: list[FakeStub] = []
    yield made
    for stub in made:
        stub.close()


def test_open_requests_are_waited_for(tmp_path: Path, stubs: list[FakeStub]) -> None:
    stubs.append(FakeStub(tmp_path, seconds=0.4))
    assert drain(tmp_path, StateReader(tmp_path), NO_METRICS, timeout_s=600)
    assert stubs[0].deadlines == [600]


def test_who_is_let_in_before_the_stub_notices_is_waited_for(tmp_path: Path, stubs: list[FakeStub]) -> None:
    """A stub that others keep from the processor says late that a request is open."""
    stubs.append(FakeStub(tmp_path, seconds=1.5, late_s=0.7))
    assert drain(tmp_path, StateReader(tmp_path), NO_METRICS, timeout_s=600)
    assert stubs[0].ended


def test_what_the_server_still_sends_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have ended and no count changes, but tritonserver works: a client reads slowly."""
    monkeypatch.setattr(drain_module, "SETTLED_S", 0.01)
    monkeypatch.setattr(drain_module, "read_metrics", lambda url, timeout_s: {ANSWERED[0]: 1.0, "other": next(used)})
    used = itertools.count(0.0)
    busy = iter([0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    wait_settled = functools.partial(drain_module._wait_settled, "", lambda: next(busy))
    wait_settled(time.monotonic() + 60, lambda: False)
    assert list(busy) == [2.0, 2.0], "it looked until it was idle"
    endless = itertools.count(0.0)
    asked = time.monotonic()
    drain_module._wait_settled("", lambda: next(endless), asked + 0.2, lambda: False)
    assert time.monotonic() >= asked + 0.2
    drain_module._wait_settled("", lambda: next(endless), asked + 600, lambda: True)  # nobody waits any more


def test_the_processor_time_of_a_process_grows() -> None:
    before = cpu_s(os.getpid())
    while cpu_s(os.getpid()) <= before:
        sum(range(10_000))
    assert cpu_s(2**22 + 1) == 0.0


def test_a_full_disk_is_no_error(tmp_path: Path, stubs: list[FakeStub], monkeypatch: pytest.MonkeyPatch) -> None:
    stubs.append(FakeStub(tmp_path, seconds=600))

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    reader = StateReader(tmp_path)
    assert reader.read() is not None
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert not drain(tmp_path, reader, NO_METRICS, timeout_s=600)


def test_the_deadline_ends_them(tmp_path: Path, stubs: list[FakeStub]) -> None:
    stubs.append(FakeStub(tmp_path, seconds=600))
    assert drain(tmp_path, StateReader(tmp_path), NO_METRICS, timeout_s=0.3)


def test_a_stub_that_does_not_end_them_is_not_waited_for(
    tmp_path: Path, stubs: list[FakeStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "STUB_GRACE_S", 0.3)
    stubs.append(FakeStub(tmp_path, seconds=600, heeds_deadline=False))
    assert not drain(tmp_path, StateReader(tmp_path), NO_METRICS, timeout_s=0.1)


def test_hurry_moves_the_deadline_to_now(tmp_path: Path, stubs: list[FakeStub]) -> None:
    stubs.append(FakeStub(tmp_path, seconds=600))
    asked = time.monotonic()
    assert drain(tmp_path, StateReader(tmp_path), NO_METRICS, 600, hurry=lambda: time.monotonic() > asked + 0.3)
    assert stubs[0].deadlines == [600, 0]


def test_without_a_stub_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert not drain(tmp_path, StateReader(tmp_path), NO_METRICS, timeout_s=600)
    assert not (tmp_path / DRAIN_FILE).exists()


def test_a_stub_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing new of its open request. Ten seconds pass at each look at the clock."""
    StateWriter(tmp_path).write("ready", 7, 1)
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 10.0
        return now

    monkeypatch.setattr(time, "monotonic", monotonic)
    drain(tmp_path, StateReader(tmp_path), NO_METRICS, timeout_s=1e9)
    assert now < 200


def test_a_stub_that_has_long_been_silent_is_not_listened_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It will not say that it lets nobody in: another server takes its place all the sooner."""
    StateWriter(tmp_path).write("ready", 7, 0)
    reader, looks = StateReader(tmp_path), []
    assert reader.read() is not None
    reader._age_s = drain_module.HUNG_AFTER_S + 1
    monkeypatch.setattr(time, "sleep", looks.append)
    drain(tmp_path, reader, NO_METRICS, timeout_s=600, hurry=lambda: True)
    assert looks == [drain_module.TEXT_NOTICE_S]


def test_a_state_is_as_old_as_its_last_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reader's monotonic clock: what time of day the stub wrote does not matter."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reader = StateReader(tmp_path)
    assert reader.read() is None
    state = {"engine": "ready", "engine_pid": 7, "active": 2, "since": 0, "time": 1e12}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert (found := reader.read()) is not None
    assert (found.engine, found.engine_pid, found.active, found.age_s) == ("ready", 7, 2, 0)
    now += 6
    assert (found := reader.read()) is not None and found.age_s == 6
    (tmp_path / "state.json").write_text(json.dumps(state | {"time": 5.0}))
    assert (found := reader.read()) is not None and found.age_s == 0
    (tmp_path / "state.json").write_text('{"engine"')
    assert (half := reader.read()) is not None and half.engine == "ready"
    (tmp_path / "state.json").unlink()
    assert reader.read() is None


def test_the_drain_file_says_how_long(tmp_path: Path) -> None:
    assert drain_deadline(tmp_path) is None
    ask_to_drain(tmp_path, 12.5)
    assert drain_deadline(tmp_path) == 12.5
    assert [path.name for path in tmp_path.iterdir()] == [DRAIN_FILE]


def test_a_stub_on_a_full_disk_still_says_how_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = StateWriter(tmp_path), StateReader(tmp_path)
    writer.write("ready", 7, 100)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    writer.write("loading", None, 0)
    found = reader.read()
    assert found is not None and (found.engine, found.engine_pid, found.active) == ("loading", None, 0)
