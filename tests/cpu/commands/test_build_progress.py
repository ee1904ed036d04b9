"""What a build shows while it runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.display import Display
from kvforge.compiler import BuildOptions
from kvforge.compiler.build import stages
from kvforge.compiler.progress import BuildProgress
from model_defs.weights import weight_specs

TEACHER = Path(__file__).parents[3] / "model_defs/assets/tiny-teacher"
STAGES = ["read", "weights", "operators"]
STAGES += [f"{what} {graph}" for graph in ("lower", "upper") for what in ("export", "check", "compile")]
STAGES += ["link", "manifest"]


@pytest.fixture(scope="module")
def verbose_build(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    engine = tmp_path_factory.mktemp("progress") / "engine"
    command = [sys.executable, "-m", "kvforge", "-v", "build", str(TEACHER), "-o", str(engine)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_verbose_build_names_each_stage_and_its_seconds(verbose_build: subprocess.CompletedProcess[str]) -> None:
    assert verbose_build.returncode == 0, verbose_build.stderr
    lines = [line for line in verbose_build.stderr.splitlines() if re.match(r"kvforge: .*: [\d.]+ s", line)]
    assert [line.split(": ")[1] for line in lines] == STAGES
    assert lines[1].endswith("MiB") and verbose_build.stdout.count("\n") == 1


def test_the_bar_shows_stages_and_bytes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    names = stages(BuildOptions())
    assert list(names) == [*STAGES[:-2], "export early_exit", "check early_exit", "compile early_exit", *STAGES[-2:]]
    with BuildProgress(Display(), names) as shown:
        shown.stage("weights")
        shown.converted(3 << 20, 12 << 20)
    shown = capsys.readouterr().err
    assert "weights" in shown and "3.0 MiB of 12.0 MiB" in shown
    with BuildProgress(Display(quiet=True, verbose=True), names) as shown:
        shown.stage("weights")
        shown.converted(3 << 20, 12 << 20)
    assert capsys.readouterr().err == ""


def test_bytes_are_counted_to_the_end(tmp_path: Path) -> None:
    import torch

    from kvforge.compiler.convert import convert_weights

    checkpoint = open_model(TEACHER)
    config = read_model_config(checkpoint)
    seen: list[tuple[int, int]] = []
    convert_weights(checkpoint, config, torch.bfloat16, tmp_path / "w", lambda done, total: seen.append((done, total)))
    total = seen[-1][1]
    assert seen == sorted(seen) and seen[0] == (0, total) and seen[-1] == (total, total)
    assert total > sum(2 * torch.Size(spec.shape).numel() for spec in weight_specs(config)) - 1
    assert 0 < (tmp_path / "w").stat().st_size - total < 100_000
