"""Two processes under torchrun train as one does, continue each other's runs, and do not hang when one fails."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvforge.distill import DistillConfig, distill, distill_checkpoint
from kvforge.distill.packing import DataSettings
from tests.support.models.checkpoints import load_weights
from tests.support.models.distillation import (
    assert_trained_alike,
    load_with_teacher,
    random_data,
    rewired_checkpoint,
)

ROOT = Path(__file__).resolve().parents[3]

WORKER = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from kvforge.cli import main
from kvforge.distill import DistillConfig, distill, world
from tests.support.models.distillation import load_with_teacher, random_data

work, command = Path(sys.argv[1]), sys.argv[2:]
checkpoint = Path(command[1])

def run(directory, train="partial", **options):
    config = DistillConfig(dtype="fp32", device="cpu", max_steps=5, batch_size=8, micro_batch=3, lr=1e-3,
                           checkpoint_every=2, train=train)
    distill(config, load_with_teacher(checkpoint), random_data(), work / directory, **options)

def fail(row):
    if world.rank() == 1 and row["step"] == 3:
        raise RuntimeError("one process fails")

with world.processes("cpu", timeout_seconds=300):
    run("partial")
    run("full", train="full")
    run("parts", stop_after=3)
    run("parts")
    run("begun")
    assert main(command) == 0
    try:
        assert main(command) == 1 and world.rank() == 0
    except SystemExit as end:
        assert end.code == 1 and world.rank() == 1
    (work / f"done{{world.rank()}}").touch()
    run("failing", on_step=fail)
"""
"""Runs of two processes: whole ones, one in two pieces, one that one process began, the command, the same again, and
one that fails."""

CONFIG = DistillConfig(
    dtype="fp32", device="cpu", max_steps=5, batch_size=8, micro_batch=3, lr=1e-3, checkpoint_every=2
)
"""What WORKER trains with."""
TRAINED = 1e-4
"""What rounding may change of a loss, relative and, of one near zero, absolutely. Weights whose gradient nearly
vanished, one in a hundred at most, may be off by 2 * 5 updates of 1e-3 (see ``assert_trained_alike``), and move the
loss by the product of these offsets with gradients that are a thousandth of the others'; all else is fp32's 1e-5."""

COMMAND = "--length 48 --batch-size 4 --micro-batch 2 --max-steps 3 --dtype fp32 --lr 1e-3 --device cpu".split()


def torchrun(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )


def rows(work: Path) -> list[dict[str, float]]:
    with (work / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def saved(work: Path) -> dict[str, torch.Tensor]:
    return torch.load(work / "state.pt", weights_only=True)["weights"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewired_checkpoint(tmp_path_factory.mktemp("processes") / "c", early_exit=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"after {i} comes {i + 1}"}) + "\n" for i in range(20)))
    return path


@dataclass(frozen=True)
class Trained:
    """Where WORKER ran, and what it printed."""

    work: Path
    process: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def trained(checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    work = tmp_path_factory.mktemp("two")
    (work / "worker.py").write_text(WORKER)
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), work / "begun", stop_after=3)
    command = ("distill", checkpoint, work / "output", "--data", data, *COMMAND)
    process = torchrun(work / "worker.py", work, *command)
    assert (work / "done0").exists() and (work / "done1").exists(), process.stderr
    return Trained(work, process)


@pytest.mark.parametrize("train", ["partial", "full"])
def test_two_processes_train_as_one(checkpoint: Path, trained: Trained, tmp_path: Path, train: str) -> None:
    distill(dataclasses.replace(CONFIG, train=train), load_with_teacher(checkpoint), random_data(), tmp_path)
    for one, two in zip(rows(tmp_path), rows(trained.work / train), strict=True):
        for name in ("step", "tokens", "lr", "loss", "kl", "hidden", "early_exit_kl", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=TRAINED, abs=TRAINED), name
    assert_trained_alike(saved(trained.work / train), saved(tmp_path), CONFIG)


def test_two_processes_resume(trained: Trained) -> None:
    whole, parts = saved(trained.work / "partial"), saved(trained.work / "parts")
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_one_process_continues_the_run_of_two(checkpoint: Path, trained: Trained) -> None:
    model = load_with_teacher(checkpoint)
    assert distill(CONFIG, model, random_data(), trained.work / "partial").step == 5
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved(trained.work / "partial").items())


def test_two_processes_continue_the_run_of_one(trained: Trained) -> None:
    assert_trained_alike(saved(trained.work / "begun"), saved(trained.work / "partial"), CONFIG)
    assert [row["step"] for row in rows(trained.work / "begun")] == [1, 2, 3, 4, 5]


def check_output(checkpoint: Path, data: Path, output: Path, tmp_path: Path) -> None:
    config = DistillConfig(length=48, batch_size=4, micro_batch=2, max_steps=3, dtype="fp32", lr=1e-3, device="cpu")
    distill_checkpoint(checkpoint, tmp_path / "one", data, config, DataSettings(48))
    assert_trained_alike(load_weights(output), load_weights(tmp_path / "one"), config)


def test_command_of_two_processes(checkpoint: Path, data: Path, trained: Trained, tmp_path: Path) -> None:
    check_output(checkpoint, data, trained.work / "output", tmp_path)
    assert trained.process.stdout.count("output: 3 steps") == 1
    # Given again, the output is there: process 0 says so, and the other one ends with it.
    assert trained.process.stderr.count("add --force to replace it, or choose another output directory") == 1


def test_a_process_that_fails_ends_the_others(trained: Trained) -> None:
    assert trained.process.returncode != 0 and "one process fails" in trained.process.stderr
    state = torch.load(trained.work / "failing" / "state.pt", weights_only=True)
    assert state["progress"]["step"] == 2


def test_command_under_torchrun(checkpoint: Path, data: Path, tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("--full: starts two more processes")
    done = torchrun("-m", "kvforge", "distill", checkpoint, tmp_path / "two", "--data", data, *COMMAND)
    assert done.returncode == 0, done.stderr
    check_output(checkpoint, data, tmp_path / "two", tmp_path)
