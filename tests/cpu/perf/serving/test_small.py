"""Both load generators at small size: each gets its arguments, and a request without its whole answer is a failure."""

import argparse
import json
from pathlib import Path

import pytest

from perf.serving import run_aiperf, run_perf_analyzer, small

LENGTHS = {"input_tokens": 8, "output_tokens": 4, "machine": "m"}


@pytest.mark.parametrize("num_incomplete", [0, 1])
def test_both_run_and_keep_their_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_incomplete: int
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    row = {"engine": "e", "mode": "concurrency", "level": 1, "num_requests": 1, "num_incomplete": num_incomplete}

    def sweep(args: argparse.Namespace, given: list[str]) -> dict:
        assert args.concurrency == [1, 4, 16, 32] and args.request_rate == [4.0] and args.input_tokens == 512
        goals = {"ttft": 500.0, "tpot": 50.0}
        return {**LENGTHS, "command": " ".join(given), "model": "ensemble", "goals_ms": goals, "rows": [row]}

    def http(args: argparse.Namespace, given: list[str]) -> dict:
        assert args.concurrency == [4, 16] and args.waves == 2 and args.input_tokens == 256
        return {**LENGTHS, "command": " ".join(given), "engine": "e", "rows": []}

    monkeypatch.setattr(run_perf_analyzer, "run", sweep)
    monkeypatch.setattr(run_aiperf, "run", http)
    monkeypatch.setattr("sys.argv", ["small", "--output-dir", str(tmp_path)])
    assert small.main() == num_incomplete
    assert "AIPerf, e" in capsys.readouterr().out
    names = {f"serving-perf-analyzer.{end}" for end in ("json", "md", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == names | {"serving-aiperf.json", "serving-aiperf.md"}
    report = json.loads((tmp_path / "serving-perf-analyzer.json").read_text())
    assert report["command"] == " ".join(small.PERF_ANALYZER)
