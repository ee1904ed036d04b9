"""Two checkouts run one engine by turns."""

import json
from pathlib import Path

import pytest

from perf.engine import versions
from perf.harness import options
from perf.harness.files import ROUNDED
from tests.support.models.engines import EngineSpec
from tests.support.models.shelf import EngineShelf

LARGE_VOCABULARY = EngineSpec("llama", model=(("num_hidden_layers", 1), ("vocab_size", 30016)))
"""The peers' prompts have token ids up to 30000."""


def test_both_sides_run_every_turn(
    engines: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workloads = tmp_path / "workloads.json"
    workloads.write_text(json.dumps({"small": {"requests": 2, "input_tokens": 9, "output_tokens": 4}}))
    command = [
        "versions",
        str(engines.engine(LARGE_VOCABULARY)),
        "--against",
        str(versions.ROOT),
        "--workloads",
        str(workloads),
    ]
    monkeypatch.setattr("sys.argv", [*command, "--turns", "2", "--output", str(tmp_path / "report")])
    assert versions.EXPERIMENT.run() == 0
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [len(row["runs"][side]) for side in ("before", "now")] == [2, 2]
    totals = {side: [run["total_s"] for run in row["runs"][side]] for side in row["runs"]}
    ratios = [before / now for before, now in zip(totals["before"], totals["now"], strict=True)]
    assert row["ratios"]["rate"] == pytest.approx(ratios, rel=3 * ROUNDED)
    assert f"{row['rate_ratio']:8.3f}" in capsys.readouterr().out


def test_a_checkout_without_the_program_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(options, "target_of", lambda folder: "cpu")  # the engine is not looked at
    monkeypatch.setattr("sys.argv", ["versions", str(tmp_path), "--against", str(tmp_path / "none")])
    assert versions.EXPERIMENT.run() == 1
    assert "before cannot be started" in capsys.readouterr().err
