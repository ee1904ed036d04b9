"""How programs that measure show and keep their reports, and what they say where that fails."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from perf.harness.command import begin_report, run_program
from perf.harness.experiment import Experiment
from perf.harness.options import lengths, levels, number, output


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    output("OUTPUT.json")(parser)
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
    lengths(8, 8)(parser)
    levels([1], min_requests=1, kv_cache_gib=0.5)(parser)
    for option in ("--input-tokens", "--concurrency", "--waves"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"{option}={given}"] if option != "--concurrency" else [option, given])
        assert f"argument {option}: " in capsys.readouterr().err


def test_what_programs_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["…/perf/serving/soak.py", "--minutes", "1"])
    assert begin_report("perf.serving.soak")["command"] == "python -m perf.serving.soak --minutes 1"
    for waves in (True, False):
        parser = argparse.ArgumentParser()
        levels([1, 4], min_requests=12, kv_cache_gib=0.5, waves=waves)(parser)
        given = vars(parser.parse_args(["--concurrency", "2", "3"]))
        assert given == {
            "concurrency": [2, 3], "min_requests": 12, "kv_cache_gib": 0.5, "timeout_s": 300.0,
            **({"waves": 3} if waves else {}),
        }  # fmt: skip


DECLARED = Experiment(
    "perf.folder.program",
    "What it measures.",
    options=(number("--turns", 2, "of each"), output("OUTPUT.json and .md")),
    measure=lambda args: ({"name": name, "seconds": 1.5 * args.turns} for name in ("a", "b")),
    settings=("turns",),
    title="Seconds",
    notes="In {turns} turns.",
    columns=lambda report: (("", "name"), ("ms", "seconds", ".0f", 1e3), ("", "absent", "+.1f"), ("", len, "{} keys")),
    check=lambda args: "--turns is odd" if args.turns % 2 else None,
)
"""A program as a declaration."""


def test_a_declaration_is_a_program(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert DECLARED.run(["--turns", "4", "--output", str(tmp_path / "found")]) == 0
    report = json.loads((tmp_path / "found.json").read_text())
    assert list(report) == ["command", "machine", "turns", "rows"] and report["turns"] == 4
    assert report["command"] == f"python -m perf.folder.program --turns 4 --output {tmp_path / 'found'}"
    assert report["rows"] == [{"name": "a", "seconds": 6.0}, {"name": "b", "seconds": 6.0}]
    text = (tmp_path / "found.md").read_text()
    assert text.startswith("# Seconds\n\n`python -m perf.folder.program --turns 4") and "\n\nIn 4 turns.\n\n" in text
    assert (
        text.endswith("| a | 6000 |  | 2 keys |\n| b | 6000 |  | 2 keys |\n") and capsys.readouterr().out == text + "\n"
    )
    with pytest.raises(SystemExit):
        DECLARED.run(["--turns", "3"])
    assert "error: --turns is odd" in capsys.readouterr().err


def test_a_declaration_may_keep_earlier_rows_or_do_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    kept = dataclasses.replace(DECLARED, merged=("name",), is_plain=True)
    (tmp_path / "found.json").write_text(
        json.dumps({"rows": [{"name": "b", "seconds": 1}, {"name": "c", "seconds": 2}]})
    )
    assert kept.run(["--output", str(tmp_path / "found")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["name"], row["seconds"]) for row in rows] == [("b", 3.0), ("c", 2), ("a", 3.0)]
    assert not (tmp_path / "found.md").exists()
    other = dataclasses.replace(DECLARED, instead=lambda args: print("made") is None)
    capsys.readouterr()
    assert other.run([]) == 0 and capsys.readouterr().out == "made\n"
