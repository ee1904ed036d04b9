"""Commands take a checkpoint by its name on the Hub; what a build shows while it runs."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.cli import main
from kvforge.common.display import Display
from kvforge.compiler import BuildOptions
from kvforge.compiler.build import REST, stages
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.progress import BuildProgress
from kvforge.manifest import load_manifest
from tests.support.hub_server import HubServer, Repository, hub_server
from tests.support.models.checkpoints import make_checkpoint
from tests.support.serving.serve_process import FREE_PORTS

TEACHER = Path(__file__).parents[3] / "model_defs/assets/tiny-teacher"
NAME = "someone/tiny"
STAGES = ["read", "weights", "operators"]
STAGES += [f"{what} {graph}" for graph in ("upper", "lower") for what in ("export", "check", "compile")]
STAGES += ["link", "manifest"]
WITHOUT_COMPILER = """
import contextlib, sys
from kvforge.cli import main
from kvforge.compiler.targets import cpu
cpu.package_writer = lambda: contextlib.nullcontext(lambda program, path: path.write_bytes(b""))
sys.exit(main(sys.argv[1:]))
"""
"""The command, with empty files for packages."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("published") / "tiny", dtype=torch.bfloat16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def hub(checkpoint: Path) -> Iterator[HubServer]:
    with hub_server() as server:
        server.repositories[NAME] = Repository(checkpoint, branches=("main", "v2"))
        yield server


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def build(hub: HubServer, cache: Path, full: bool) -> subprocess.CompletedProcess[str]:
    """The one build by name; its cache is what the other tests find without a network. Nobody loads the engine, whose
    graphs are compiled with --full alone."""
    kvforge = ["-m", "kvforge"] if full else ["-c", WITHOUT_COMPILER]
    command = [sys.executable, *kvforge, "-v", "build", NAME, "--revision", "v2", "-o", str(cache / "engine")]
    return subprocess.run(command, capture_output=True, text=True, env=hub.environment(cache))


@pytest.fixture
def offline(build: subprocess.CompletedProcess[str], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))


def test_a_build_by_name_is_one_of_the_same_checkpoint(
    build: subprocess.CompletedProcess[str], cache: Path, checkpoint: Path
) -> None:
    assert build.returncode == 0, build.stderr
    assert load_manifest(cache / "engine").checkpoint_sha256 == open_model(checkpoint).sha256()
    assert build.stdout.count("\n") == 1 and build.stdout.startswith(f"{cache / 'engine'}: llama")


def test_a_verbose_build_names_each_stage_and_its_seconds(build: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in build.stderr.splitlines() if re.match(r"kvforge: .*: [\d.]+ s", line)]
    assert [line.split(": ")[1] for line in lines] == STAGES
    assert lines[1].endswith("KiB")


def test_a_plan_reads_the_configuration_alone(hub: HubServer, tmp_path: Path) -> None:
    hub.requests.clear()
    command = [sys.executable, "-m", "kvforge", "plan", "--model", f"{NAME}@v2", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=hub.environment(tmp_path))
    assert result.returncode == 0, result.stderr
    assert hub.downloads() == ["config.json"]
    plan = json.loads(result.stdout)
    assert plan["model"] == "tiny" and plan["num_layers"] == 2


def test_a_plan_of_a_local_checkpoint_is_the_same(
    offline: None, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", NAME, "--revision", "v2"]) == 0
    by_name = capsys.readouterr().out
    assert main(["plan", "--model", str(checkpoint)]) == 0
    assert capsys.readouterr().out == by_name
    assert main(["plan", "--model", "llama-3.1-8", "--json"]) == 1
    assert "or OWNER/NAME on the Hub" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "function"),
    [
        (["rewire", NAME, "OUT", "--cut-layer", "4"], "kvforge.rewire.rewire_checkpoint"),
        (["quantize", NAME, "-o", "OUT", "--recipe", "fp8"], "kvforge.quantize.quantize_checkpoint"),
        (["distill", NAME, "OUT", "--data", "d.jsonl"], "kvforge.distill.distill_checkpoint"),
    ],
)
def test_the_others_get_the_snapshot(
    words: list[str],
    function: str,
    offline: None,
    cache: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reached(Exception):
        pass

    def reached(found: Path, *given: Any, **more: Any) -> None:
        raise Reached(found)

    monkeypatch.setattr(function, reached)
    with pytest.raises(Reached) as found:
        main([*words, "--revision", "v2"])
    (folder,) = found.value.args
    assert folder == cache / f"hub/models--{NAME.replace('/', '--')}/snapshots" / ("a" * 40)
    assert open_model(folder).sha256() == open_model(checkpoint).sha256()


@pytest.mark.parametrize(
    "words",
    [
        ["build", "nonexist", "-o", "OUT"],
        ["rewire", "nonexist", "OUT", "--cut-layer", "4"],
        ["serve", "nonexist", *FREE_PORTS],
    ],
)
def test_a_path_that_is_not_there_may_have_been_a_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    line = capsys.readouterr().err
    assert line.startswith("kvforge: error: nonexist ") and len(line.splitlines()) == 1
    assert "a checkpoint, or OWNER/NAME" in line or "a GGUF file, or OWNER/NAME" in line


def test_a_name_that_is_not_in_the_cache_is_a_sentence(
    offline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "someone/else", "-o", str(tmp_path / "engine")]) == 1
    assert "someone/else is not a path here" in (line := capsys.readouterr().err) and len(line.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_bar_shows_stages_and_bytes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    names = stages(BuildOptions())
    early_exit = ["export early_exit", "check early_exit", "compile early_exit"]
    assert list(names) == [*STAGES[:3], *early_exit, *STAGES[3:-1], REST, "manifest"]
    with BuildProgress(Display(), names) as progress:
        progress.stage("weights")
        progress.converted(3 << 20, 12 << 20)
    shown = capsys.readouterr().err
    assert "weights" in shown and "3.00 MiB of 12.00 MiB" in shown
    with BuildProgress(Display(quiet=True, verbose=True), names) as progress:
        progress.stage("weights")
        progress.converted(3 << 20, 12 << 20)
    assert capsys.readouterr().err == ""


def test_without_a_terminal_long_stages_are_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100, 5))
    monkeypatch.setattr("kvforge.compiler.progress.time", SimpleNamespace(monotonic=lambda: next(clock) / 10))
    with BuildProgress(Display(), stages(BuildOptions())) as progress:
        progress.stage("read")  # takes half a second
        progress.stage("weights")
        progress.converted(12 << 20, 12 << 20)
        next(clock), next(clock)
    assert capsys.readouterr().err == "kvforge: weights: 1.5 s, 12.00 MiB\n"


def test_bytes_are_counted_to_the_end(tmp_path: Path) -> None:
    checkpoint, seen = open_model(TEACHER), []
    config = read_model_config(checkpoint)
    convert_weights(checkpoint, config, torch.bfloat16, tmp_path / "w", lambda *counted: seen.append(counted))
    total = seen[-1][1]
    assert seen == sorted(seen) and seen[0] == (0, total) and seen[-1] == (total, total)
    assert 0 <= (tmp_path / "w").stat().st_size - total < 100_000  # the header
