"""Both load generators at small size: each gets its arguments, and a request without its whole answer is a failure."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from perf.serving import run_aiperf, run_perf_analyzer, small


@pytest.mark.parametrize("num_incomplete", [0, 1])
def test_both_run_and_keep_their_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_incomplete: int
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    row = {"engine": "e", "mode": "concurrency", "level": 1, "num_requests": 1, "num_incomplete": num_incomplete}

    def sweep(args: argparse.Namespace) -> dict:
        assert args.concurrency == [1, 4, 16, 32] and args.request_rate == [4.0] and args.input_tokens == 512
        goals = {"ttft": 500.0, "tpot": 50.0}
        return {"goals_ms": goals, "rows": [row]}

    def http(args: argparse.Namespace) -> dict:
        assert args.concurrency == [4, 16] and args.waves == 2 and args.input_tokens == 256
        return {"engine": "e", "rows": []}

    for program, measure in ((run_perf_analyzer, sweep), (run_aiperf, http)):
        monkeypatch.setattr(program, "EXPERIMENT", dataclasses.replace(program.EXPERIMENT, measure=measure))
    monkeypatch.setattr("sys.argv", ["small", "--output-dir", str(tmp_path)])
    assert small.main() == num_incomplete
    assert "AIPerf, e" in capsys.readouterr().out
    names = {f"serving-perf-analyzer.{end}" for end in ("json", "md", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == names | {"serving-aiperf.json", "serving-aiperf.md"}
    report = json.loads((tmp_path / "serving-perf-analyzer.json").read_text())
    assert report["command"].startswith(
        f"python -m perf.serving.run_perf_analyzer {' '.join(small.PERF_ANALYZER)} --output "
    )
