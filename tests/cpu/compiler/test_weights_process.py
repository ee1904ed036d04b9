"""Weights that are written in a process of their own while graphs are made: the same file, and one end for both."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint.model import open_model
from kvforge.common.errors import BuildError, CheckpointError
from kvforge.compiler import build, build_engine, weights_process
from kvforge.compiler.targets import cpu
from kvforge.manifest import WEIGHTS_FILE, verify_files
from tests.support.rounding import config_of

STAGES = ["read", "weights", "operators"]
STAGES += [f"{what} {graph}" for graph in ("upper", "lower") for what in ("export", "check", "compile")]
STAGES += ["link", build.REST, "manifest"]
MARK = "KVFORGE_TEST_OF_WEIGHTS"
Graphs = Callable[[Callable[[str], object]], None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> "list[subprocess.Popen[bytes]]":
    """The processes that builds start for weights; any model has one, whatever the machine."""
    monkeypatch.setattr(build, "_is_apart", lambda *_: True)
    monkeypatch.setattr(cpu, "package_writer", lambda: contextlib.nullcontext(lambda _, path: path.write_bytes(b"")))
    begun: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **how: Any) -> Any:
        begun.append(popen(command, **how))
        return begun[-1]

    monkeypatch.setattr(weights_process.subprocess, "Popen", start)
    return begun


def refused(
    checkpoint: Path, folder: Path, graphs: Graphs, error: type[Exception], words: str, patch: pytest.MonkeyPatch
) -> None:
    """A build whose graphs are made by ``graphs`` says why it ended, and leaves nothing."""
    patch.setattr(cpu, "write_graphs", lambda config, options, staging, progress: graphs(progress))
    with pytest.raises(error, match=words):
        build_engine(checkpoint, folder / "engine")
    assert os.listdir(folder) == ["checkpoint"]


def stages_without_end(progress: Callable[[str], object]) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        progress("export lower")
        time.sleep(0.05)


def test_the_file_is_the_same(checkpoint: Path, tmp_path: Path, started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    apart = build_engine(
        checkpoint, tmp_path / "apart", progress=shown.append, converted=lambda *both: shown.append(both)
    )
    size = (tmp_path / "apart" / WEIGHTS_FILE).stat().st_size
    assert [one for one in shown if isinstance(one, str)] == STAGES
    counted = shown[shown.index(build.REST) + 1 : -1]
    assert counted[0][0] == 0 and counted[-1][0] == counted[-1][1] and counted[-1][1] <= size
    assert [process.returncode for process in started[-1:]] == [0]
    monkeypatch.setattr(build, "_is_apart", lambda *_: False)
    here = build_engine(checkpoint, tmp_path / "here")
    assert here == apart
    verify_files(tmp_path / "here", here)
    assert apart.checkpoint_sha256 == open_model(checkpoint).sha256()
    assert (tmp_path / "here" / WEIGHTS_FILE).read_bytes() == (tmp_path / "apart" / WEIGHTS_FILE).read_bytes()


def test_modules_of_the_current_folder_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not the one of Python')\n")
    monkeypatch.chdir(tmp_path)
    with weights_process.weights_process("missing") as apart, pytest.raises(CheckpointError, match="missing"):
        apart.wait()


def test_weights_that_fail_end_the_graphs(
    checkpoint: Path, tmp_path: Path, started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][1, 2] = torch.nan
    save_file(weights, checkpoint / "model.safetensors")
    refused(checkpoint, tmp_path, stages_without_end, CheckpointError, "up_proj", monkeypatch)


def test_graphs_that_fail_end_the_weights(
    checkpoint: Path, tmp_path: Path, started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(progress: Callable[[str], object]) -> None:
        raise BuildError("enough.")

    refused(checkpoint, tmp_path, fail, BuildError, "enough", monkeypatch)
    assert started[-1].returncode is not None


@pytest.mark.parametrize("waits", [True, False])
def test_a_process_that_is_killed_is_a_sentence(
    waits: bool, checkpoint: Path, tmp_path: Path, started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is noticed at the next stage, or when the graphs are there."""

    def kill(progress: Callable[[str], object]) -> None:
        started[-1].send_signal(signal.SIGKILL)
        if not waits:
            stages_without_end(progress)

    refused(checkpoint, tmp_path, kill, BuildError, r"ended without an answer \(SIGKILL\); a machine", monkeypatch)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_stopped_ends_the_weights(how: signal.Signals, checkpoint: Path, tmp_path: Path) -> None:
    """Also where the process is not yet ready to be ended with its parent, as here: it has just been started."""
    script = (
        "import signal, time\nfrom kvforge.compiler import build\nbuild._is_apart = lambda *_: True\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in background
        f"build.build_engine({str(checkpoint)!r}, {str(tmp_path / 'out' / 'engine')!r}, progress=lambda stage: "
        "stage == 'operators' and (print(flush=True), time.sleep(600)))"
    )
    marked = os.environ | {MARK: str(tmp_path)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=marked) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert len(processes_with(str(tmp_path))) == 2
        process.send_signal(how)
        assert process.wait(timeout=300) != 0
    until = time.monotonic() + 300
    while processes_with(str(tmp_path)):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert len(os.listdir(tmp_path / "out")) == (1 if how == signal.SIGKILL else 0)


def processes_with(mark: str) -> list[str]:
    """Those whose environment has it."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and f"{MARK}={mark}\0".encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def test_small_models_and_those_with_more_have_no_process(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    config = config_of(checkpoint)
    assert not build._is_apart(config, None)
    monkeypatch.setattr(build, "MIN_APART", 1)
    assert build._is_apart(config, None) and not build._is_apart(config, None, {})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not build._is_apart(config, None)
