"""The self-test of the GPU's queue: the tiny form of every experiment runs on a CPU, so that none fails there for a
name."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.gpu.carry.contents import CONTENTS
from perf.gpu.queue.experiment import Experiment, sources_digest
from perf.gpu.queue.experiments import EXPERIMENTS
from perf.harness.engines import ROOT
from tests.support.sessions.uncompiled import leave_uncompiled

NAMES = [experiment.name for experiment in EXPERIMENTS]


def test_names_sources_and_contents_are_there() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for experiment in EXPERIMENTS:
        assert len(sources_digest(experiment)) == 64 and set(experiment.carried) <= set(CONTENTS)
        own = f"{experiment.module.replace('.', '/')}.py"
        assert own in experiment.sources, f"{experiment.name}: a change of its own program makes no result stale"
        placeholders = [word for word in experiment.arguments if "{carried}/" in word]
        assert {word.rpartition("/")[2] for word in placeholders} <= set(experiment.carried)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=NAMES)
def test_what_a_gpu_runs_is_parsed(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    program = importlib.import_module(experiment.module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    options = program.parse_arguments([*experiment.command(tiny=False)[1:], "--json", "there.json"])
    assert (options.device, options.tiny, options.json) == ("cuda", False, Path("there.json"))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=NAMES)
def test_tiny_form(experiment: Experiment, tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and graphs as torch runs them; with --full compiled and as the queue starts it. TensorRT for RTX
    has a process to itself: the suite's own may have loaded TensorRT's libraries."""
    is_rtx = experiment.name == "tensorrt-rtx"
    if is_rtx and importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("needs the extra tensorrt-rtx")
    report, tiny = tmp_path / "report.json", experiment.command(tiny=True)
    work = ["--work", str(tmp_path)] if experiment.module not in WITHOUT_WORK else []
    if full or is_rtx:
        subprocess.run([sys.executable, "-m", *tiny, *work, "--json", str(report)], cwd=ROOT, check=True)
    else:
        leave_uncompiled(monkeypatch)
        assert not importlib.import_module(experiment.module).main([*tiny[1:], *work, "--json", str(report)])
    assert json.loads(report.read_text())["date"]


WITHOUT_WORK = {f"perf.gpu.{name}" for name in ("operators", "suite", "tensorrt_rtx", "tunings")}
