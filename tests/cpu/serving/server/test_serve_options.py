"""Values of `kvforge serve` options that cannot work are refused before anything is started."""

from pathlib import Path

import pytest

from kvforge.cli import main
from tests.support.serving.serve_process import FREE_PORTS


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-queue-size", "-1"),
        ("--max-request-bytes", "0"),
        ("--drain-timeout", "-0.5"),
        ("--drain-timeout", "nan"),
        ("--max-restarts", "-1"),
        ("--canary-period", "-1"),
    ],
)
def test_refused(option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), option, value]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"kvforge: error: {option} is ") and errors.count("\n") == 1


def test_a_folder_that_is_no_engine_leaves_no_log_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), *FREE_PORTS, "--log-file", str(tmp_path / "log")]) == 1
    assert "is not an engine directory" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
