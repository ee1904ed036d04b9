"""How programs that measure show and keep their reports, and what they say where that fails."""

import argparse
import json
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from perf.harness.command import add_lengths, add_levels, add_report, begin_report, run_program


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_report(parser, "OUTPUT.json")
    return parser.parse_args(given)


def test_a_report_is_shown_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    args = arguments("--output", str(tmp_path / "found"))
    assert run_program(args, lambda: {"rows": 3}, lambda report: f"{report['rows']} rows", markdown=True) == 0
    assert capsys.readouterr().out == "3 rows\n" and (tmp_path / "found.md").read_text() == "3 rows"
    assert json.loads((tmp_path / "found.json").read_text()) == {"rows": 3}
    assert run_program(arguments("--json"), lambda: {"rows": 3}, str) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 3} and len(list(tmp_path.iterdir())) == 2


def test_failures_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def fail() -> dict:
        raise KvforgeError("the server is gone; start it again.")

    assert run_program(arguments(), fail, str) == 1
    assert capsys.readouterr().err == "error: the server is gone; start it again.\n"
    assert run_program(arguments("--output", str(tmp_path / "no" / "found")), lambda: {}, str) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/no/found cannot be written") and error.count("\n") == 1


@pytest.mark.parametrize("place", ["no/found", "/", "."])
def test_that_a_report_cannot_be_kept_is_said_before_it_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture, place: str
) -> None:
    made: list[int] = []
    args = arguments("--output", str(tmp_path / place) if place == "no/found" else place)
    assert run_program(args, lambda: {"rows": made.append(1)}, str) == 1
    error = capsys.readouterr().err
    assert not made and "cannot be written" in error and error.count("\n") == 1


@pytest.mark.parametrize("given", ["0", "-1", "x", "nan"])
def test_numbers_that_nothing_can_be_measured_with(given: str, capsys: pytest.CaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    add_lengths(parser, 8, 8)
    add_levels(parser, [1], min_requests=1, kv_cache_gib=0.5)
    for option in ("--input-tokens", "--concurrency", "--waves"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"{option}={given}"] if option != "--concurrency" else [option, given])
        assert f"argument {option}: " in capsys.readouterr().err


def test_what_programs_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["…/perf/serving/soak.py", "--minutes", "1"])
    assert begin_report("perf.serving.soak")["command"] == "python -m perf.serving.soak --minutes 1"
    for waves in (True, False):
        parser = argparse.ArgumentParser()
        add_levels(parser, [1, 4], min_requests=12, kv_cache_gib=0.5, waves=waves)
        levels = vars(parser.parse_args(["--concurrency", "2", "3"]))
        assert levels == {
            "concurrency": [2, 3], "min_requests": 12, "kv_cache_gib": 0.5, "timeout_s": 300.0,
            **({"waves": 3} if waves else {}),
        }  # fmt: skip
