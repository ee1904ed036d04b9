"""Packages that fail or are given up while the C++ compiler works on them; the engines of other tests are the rest."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram

from kvforge.common.errors import BuildError
from kvforge.compiler import cpu_packages


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    class Sine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    return torch.export.export(Sine(), (torch.ones(3),))


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """The processes that the test started; temporary files are below ``tmp_path``."""
    processes: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def recorded(*args, **kwargs) -> subprocess.Popen:
        processes.append(popen(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(cpu_packages.subprocess, "Popen", recorded)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return processes


def run_instead(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    start = cpu_packages._Package._start
    monkeypatch.setattr(cpu_packages._Package, "_start", lambda self, _: start(self, ["sh", "-c", script]))


def test_a_failing_compiler_is_one_sentence(program, started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "echo x.cpp: warning; echo x.cpp:7: error: no such thing; exit 1")
    with (
        pytest.raises(BuildError, match=r"could not compile sine: x.cpp:7: error: no such thing$"),
        cpu_packages.package_writer() as write,
    ):
        write(program, tmp_path / "sine.pt2")
    assert os.listdir(tmp_path) == []


def test_what_compiles_ends_with_the_build(program, started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "exec sleep 600")
    with pytest.raises(KeyboardInterrupt), cpu_packages.package_writer() as write:
        write(program, tmp_path / "sine.pt2")
        assert [process.poll() for process in started].count(None) == 2
        raise KeyboardInterrupt
    assert all(process.returncode is not None for process in started)
    assert os.listdir(tmp_path) == []


def test_a_package_that_cannot_be_written_is_one_sentence(
    program, started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer of archives says in a RuntimeError that the disk is full."""

    def fail(path: str, files: list[str]) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(cpu_packages, "package_aoti", fail)
    run_instead(monkeypatch, "exit 0")
    with (
        pytest.raises(BuildError, match="could not compile sine: PytorchStreamWriter failed writing"),
        cpu_packages.package_writer() as write,
    ):
        write(program, tmp_path / "sine.pt2")
    assert os.listdir(tmp_path) == []
