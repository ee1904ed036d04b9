"""How long the engine's work may take, by a clock that the tests move: too little for no honest step, little at all."""

import contextlib
import gc
import math
import os
import random
from pathlib import Path

import pytest

from kvforge.runtime.step.work import Work
from kvforge.serving.engine.allowance import FACTOR, FLOOR_S, WINDOW, Pulse
from kvforge.serving.engine.heartbeat import LOAD_S, Heartbeat
from kvforge.serving.stub.patience import LONGEST_LOOK_S, Patience

LOOK_S = 0.1


class World:
    """An engine and its watcher with one clock. `work` has the watcher look all the while; `stalls` counts what it
    would have killed."""

    def __init__(self) -> None:
        self.now = 1e6
        self.heartbeat = Heartbeat.create()
        self.pulse = Pulse(self.heartbeat.beat, lambda: self.now)
        self.patience = Patience(self.heartbeat.read, lambda: self.now)
        self.stalls = 0
        self.pulse.idles()

    @property
    def allowance(self) -> float:
        return self.heartbeat.read()[1]

    def work(self, kind: str, units: float, seconds: float, variant: tuple[int, ...] = ()) -> None:
        self.pulse.begins(Work(kind, units, variant))  # type: ignore[arg-type]
        self.pass_time(seconds)
        self.pulse.idles()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + LOOK_S, end)
            self.stalls += self.patience.is_overdue()

    def stand_still(self, seconds: float) -> None:
        """Nobody runs, but the clock does."""
        self.now += seconds
        self.stalls += self.patience.is_overdue()

    def until_noticed(self) -> float:
        """Seconds until an engine that has fallen silent is overdue."""
        began = self.now
        while not self.patience.is_overdue():
            self.now += LOOK_S
        return self.now - began


@pytest.fixture
def world() -> World:
    return World()


def test_an_idle_engine_that_falls_silent_is_noticed(world: World) -> None:
    for _ in range(600):
        world.pass_time(0.1)
        world.pulse.idles()
    assert world.stalls == 0
    assert FLOOR_S < world.until_noticed() < 10.0


def test_a_first_step_that_compiles_is_no_stall_and_teaches_nothing(world: World) -> None:
    world.work("decode", 1, 90.0)
    assert world.stalls == 0
    world.work("decode", 1, 0.01)
    world.pulse.begins(Work("decode", 1))
    assert world.allowance == pytest.approx(FLOOR_S + FACTOR * 0.01)
    assert world.until_noticed() < 10.0


def test_a_step_of_a_new_size_may_be_captured_and_others_may_not(world: World) -> None:
    for _ in range(3):
        world.work("decode", 1, 0.01, (1, 5))
    world.work("decode", 2, 40.0, (2, 5))
    assert world.stalls == 0
    world.pulse.begins(Work("decode", 1, (1, 5)))
    assert world.allowance < 2 * FLOOR_S
    world.pulse.begins(Work("decode", 2, (2, 5)))
    assert world.allowance < 2 * FLOOR_S


def seconds_of(units: float) -> float:
    """A large model on a slow machine: weights take half a second, 200 tokens one more."""
    return 0.5 + units / 200


@pytest.mark.parametrize("noise", [1.0, FACTOR])
def test_the_largest_prompt_after_small_ones_is_no_stall(world: World, noise: float) -> None:
    """Also on a machine that is suddenly FACTOR times as slow."""
    for units in (3, 1, 7, 2, 12):
        world.work("prefill", units, seconds_of(units))
    world.work("prefill", 65536, noise * seconds_of(65536))
    assert world.stalls == 0


def test_random_schedules_raise_no_alarm(world: World) -> None:
    rng = random.Random(7)
    for _ in range(3 * WINDOW):
        units = 2 ** rng.uniform(0, 3 if rng.random() < 0.99 else 16)
        world.work(rng.choice(["prefill", "sample"]), units, seconds_of(units) * rng.uniform(1, 4))
    assert world.stalls == 0


def test_a_standstill_of_the_machine_is_no_stall_and_teaches_nothing(world: World) -> None:
    for _ in range(4):
        world.work("decode", 1, 0.01)
    world.pulse.begins(Work("decode", 1))
    for _ in range(3):
        world.stand_still(60.0)
    assert world.patience.silent_s <= 3 * LONGEST_LOOK_S
    world.pulse.idles()
    world.stand_still(3600.0)
    assert world.stalls == 0
    world.pulse.begins(Work("decode", 1))
    assert world.allowance == pytest.approx(FLOOR_S + FACTOR * 0.01)


def test_a_moment_s_disturbance_is_forgotten(world: World) -> None:
    for _ in range(4):
        world.work("decode", 1, 0.01)
    world.work("decode", 1, 4.0)
    world.pulse.begins(Work("decode", 1))
    assert world.allowance > 4 * FACTOR
    for _ in range(2 * WINDOW):
        world.work("decode", 1, 0.01)
    world.pulse.begins(Work("decode", 1))
    assert world.allowance < 2 * FLOOR_S
    world.pulse.begins(Work("decode", 1000))  # whose like was not seen lately: the largest ever bounds it
    assert FLOOR_S + FACTOR * 10 <= world.allowance < math.inf


def test_a_process_that_never_beats_is_noticed_too(world: World) -> None:
    silent = Heartbeat.create()
    world.patience = Patience(silent.read, lambda: world.now)
    assert LOAD_S < world.until_noticed() < LOAD_S + 2.0
    silent.close()


def test_a_clock_that_goes_back_changes_nothing(world: World) -> None:
    world.pass_time(2.0)
    silent = world.patience.silent_s
    world.now -= 100.0
    world.patience.is_overdue()
    assert world.patience.silent_s == silent


def test_two_views_of_one_memory_file() -> None:
    written = Heartbeat.create()
    read = Heartbeat(os.dup(written.fd))
    for count in range(2, 5):
        written.beat(count / 2)
        assert read.read() == (float(count), count / 2)
    written.close()
    assert read.read() == (4.0, 2.0)
    read.close()


def memory_files() -> list[str]:
    """This process's descriptors of memory files; other tests' threads open and close others meanwhile."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (target := os.readlink(link)).startswith("/memfd:kvforge-heartbeat"):
                found.append(f"{link.name} {target}")
    return sorted(found)


def test_no_memory_file_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no room")

    gc.collect()  # those of earlier tests
    before = memory_files()
    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="no room"):
        Heartbeat.create()
    assert memory_files() == before
