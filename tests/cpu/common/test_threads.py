"""Threads are those asked for, else those of a container's quota; never more than the process may run on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.cli import main
from kvforge.common.errors import KvforgeError
from kvforge.common.threads import ENVIRONMENT, cores_of_quota, set_threads


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "0")  # so that it is as before afterwards
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("250000 100000\n", 2.5), ("50000 100000", 0.5), ("", None), ("1 0", None), ("x y", None)],
)
def test_the_quota_of_a_control_group(tmp_path: Path, text: str, cores: float | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert cores_of_quota(file) == cores
    assert cores_of_quota(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("text", "threads"), [("max 100000", None), ("250000 100000", "2"), ("50000 100000", "1"), ("900000 100000", None)]
)
def test_no_more_than_a_container_has(tmp_path: Path, text: str, threads: str | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    set_threads(None, file)
    assert os.environ.get(ENVIRONMENT) == threads


def test_what_is_asked_for_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpu.max"
    file.write_text("100000 100000")
    monkeypatch.setenv(ENVIRONMENT, "5")
    set_threads(None, file)
    assert os.environ[ENVIRONMENT] == "5"
    set_threads(3, file)
    assert os.environ[ENVIRONMENT] == "3"


def test_an_empty_variable_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpu.max"
    file.write_text("300000 100000")
    monkeypatch.setenv(ENVIRONMENT, "")
    set_threads(None, file)
    assert os.environ[ENVIRONMENT] == "3"


def test_less_than_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KvforgeError, match="--threads is 0; give 1 or more"):
        set_threads(0)
    assert main(["bench", "nothing", "--threads", "0"]) == 1
    assert "--threads is 0" in capsys.readouterr().err


def test_torch_has_them() -> None:
    code = (
        "from kvforge.common.threads import set_threads; set_threads(1); import torch; print(torch.get_num_threads())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "1\n"
