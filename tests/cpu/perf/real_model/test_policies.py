"""KV policies beside the full cache: their engines, what is measured of them, and what an earlier run has."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvforge.compiler import BuildOptions
from kvforge.kv_policies import parse
from kvforge.manifest import load_manifest
from perf.harness.engines import TEACHER_DIR
from perf.harness.policy_engines import LARGEST, NAMES, Cell, Engines, cells_of, policy_of
from perf.real_model import policies
from perf.real_model.policies import by_policy, divergence
from tests.support.sessions.uncompiled import leave_uncompiled


def test_every_policy_has_a_cell_for_budgets_that_hold_what_it_protects() -> None:
    cells = cells_of(NAMES, [8, 512])
    assert cells[0] == Cell("full") and {cell.name for cell in cells if cell.budget == 512} == {*NAMES}
    small = {cell.name for cell in cells if cell.budget == 8}
    assert "recent" in small and "snapkv" not in small  # whose window is 32
    assert (
        str(parse(policy_of("roco", 64, 1))).startswith("roco:budget=64")
        and parse(policy_of("roco", 64, 1)).spread == 8
    )
    assert parse(policy_of("shadowkv", 128, 96)).rank == 96


def test_divergence_is_by_document() -> None:
    full = np.log(np.array([[[0.5, 0.25, 0.25]] * 2, [[0.5, 0.25, 0.25]] * 2], np.float32))
    other = full.copy()
    other[1, 0] = np.log([0.25, 0.5, 0.25])
    found = divergence(full, other)
    assert found["num_tokens"] == 4 and found["agreement"]["value"] == 0.75
    assert found["kl"]["value"] == pytest.approx(0.25 * np.log(2) / 4) and found["kl"]["low"] == 0
    assert divergence(full, full)["kl"] == {"value": 0, "low": 0, "high": 0}


def test_rules_share_an_engine_where_graphs_do_not_know_the_budget(tmp_path: Path, monkeypatch) -> None:
    leave_uncompiled(monkeypatch)
    options = BuildOptions(max_seq_len=256, max_num_seqs=2, max_num_tokens=64)
    engines = Engines(TEACHER_DIR, options, tmp_path)
    for budget in (32, 64):
        assert load_manifest(engines.of(Cell("recent", budget))).kv_policy_parameters["budget"] == budget
        assert load_manifest(engines.of(Cell("quest", budget))).kv_policy_parameters["budget"] == budget
    names = {folder.name for folder in tmp_path.iterdir()}
    assert names == {"recent", "recent-32", "recent-64", "quest-32", "quest-64"}
    assert load_manifest(tmp_path / "recent").kv_policy_parameters["budget"] == LARGEST


def test_the_program_measures_what_no_earlier_run_has(tmp_path: Path, monkeypatch, capsys) -> None:
    """A budget above the prompt's length costs nothing."""
    leave_uncompiled(monkeypatch)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "some.txt").write_text("The secret number of the old mill is 42. It was a fine day. " * 60)
    given = ["policies", str(TEACHER_DIR), str(tmp_path / "texts"), "--work", str(tmp_path / "work"), "--length", "60"]
    given += ["--forced", "5", "--retrieval-length", "90", "--num-prompts", "2", "--output", str(tmp_path / "found")]
    monkeypatch.setattr("sys.argv", [*given, "--policy", "recent", "--budget", "8", "256"])
    assert policies.EXPERIMENT.run() == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["name"], row["budget"], row["num_tokens"]) for row in rows] == [
        ("full", None, 8),
        ("recent", 8, 8),
        ("recent", 256, 8),
    ]
    assert [row["kl"]["value"] for row in (rows[0], rows[2])] == [0, 0] and rows[1]["kl"]["value"] > 0
    assert [len(row["retrieval"]) for row in rows] == [1, 0, 1]
    assert rows[0]["retrieval"][0]["num_correct"] == rows[2]["retrieval"][0]["num_correct"]
    assert (tmp_path / "found.svg").is_file() and "| recent | " in capsys.readouterr().out

    measured: list[Cell] = []
    monkeypatch.setattr(
        policies.Measurement, "row", lambda self, cell: measured.append(cell) or dict(rows[1], name="tova")
    )
    monkeypatch.setattr("sys.argv", [*given, "--policy", "recent", "tova", "--budget", "8", "--append"])
    assert policies.EXPERIMENT.run() == 0 and measured == [Cell("tova", 8)]
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 3
    monkeypatch.setattr("sys.argv", [*given, "--policy", "recent", "--budget", "8", "--append", "--num-prompts", "1"])
    assert policies.EXPERIMENT.run() == 0
    assert measured == [Cell("tova", 8), Cell("full"), Cell("recent", 8)]  # other settings


def test_policies_stand_in_the_order_of_their_divergence() -> None:
    rows = [{"name": name, "budget": budget, "kl": {"value": kl}} for name, budget, kl in
            (("a", 8, 3.0), ("a", 16, 0.5), ("b", 16, 0.1), ("b", 8, 9.0), ("full", None, 0.0))]  # fmt: skip
    assert [*by_policy(rows)] == ["b", "a"] and [*by_policy(rows)["a"]] == [8, 16]
