"""The command: experiments write their report and figure, and wrong input is one sentence."""

import json
import sys
from pathlib import Path

import pytest

from perf.simulation import simulate
from perf.simulation.cost_model import CostModel, save_costs
from perf.simulation.experiments import EXPERIMENTS

PRICES = {"steps": 0.02, "upper_calls": 0.01, "tokens": 5e-4, "survivors": 1e-3, "query_keys": 1e-8, "keys_read": 5e-8}


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    full = CostModel(16, 16, 32, 524288, {**PRICES, "tokens": 1e-3, "upper_calls": 0.0, "steps": 0.03})
    save_costs({"no cut": full, "cut 8": CostModel(16, 8, 32, 327680, PRICES)}, path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["perf.simulation.simulate", *map(str, arguments)])
    return simulate.main()


def test_one_simulation_a_variant_follows_from_the_seed(
    costs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for seed in (1, 1, 2):
        arguments = ("--requests", 30, "--rate", 0.5, "--output-tokens", 4, "--jobs", 1, "--seed", seed, "--json")
        assert run(monkeypatch, "--costs", costs, *arguments) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert [row.pop("scheduler_ms")["num_steps"] for row in rows] == [0, 0]
        reports.append(rows)
    assert reports[0] == reports[1] != reports[2]
    full, cut = reports[0]
    assert (full["variant"], cut["variant"]) == ("no cut", "cut 8")
    assert cut["ttft_s"]["mean"] < full["ttft_s"]["mean"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_writes_its_report_and_figure(
    name: str, costs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = costs.with_name(name)
    arguments = ("--experiment", name, "--requests", 3, "--output-tokens", 3, "--output", result, "--jobs", 1)
    assert run(monkeypatch, "--costs", costs, *arguments) == 0
    report = json.loads(result.with_suffix(".json").read_text())
    assert {row["variant"] for row in report["rows"]} == {"no cut", "cut 8"}
    assert len(capsys.readouterr().out.splitlines()) == len(report["rows"]) + 1
    assert result.with_suffix(".svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--variant", "cut 9"), "has no costs of 'cut 9'; it has no cut, cut 8"),
        (("--kv-cache-gib", "0.01"), "does not hold one sequence of 2256 tokens"),
        (("--rate", "-1"), "rate"),
        (("--experiment", "lengths", "--output", "missing/lengths"), "no directory missing"),
        (("--fit", "engine"), "--output"),
        (("--validate", "cut 9=engine"), "has no costs of 'cut 9'"),
        (("--max-num-tokens", "0"), "at least 1"),
        (("--jobs", "0"), "--jobs is 0"),
        (("--seed", "-1", "--rate", "1"), "--seed is -1"),
        (("--kv-cache-gib", "1e9"), "more than an engine can use"),
        (("--output", "missing/result", "--jobs", "1"), "missing/result.json cannot be written"),
    ],
)
def test_wrong_input_is_one_sentence(
    arguments: tuple, words: str, costs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--costs", costs, "--requests", 2, *arguments) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ") and words in message
