"""Retrieval by engines: the same prompts for all of them, and rows that an earlier run has."""

import json
from pathlib import Path

from kvforge.compiler import BuildOptions, build_engine
from perf.harness.engines import TEACHER_DIR
from perf.real_model.retrieval import EXPERIMENT
from tests.support.sessions.uncompiled import leave_uncompiled


def test_engines_are_asked_the_same(tmp_path: Path, monkeypatch, capsys) -> None:
    leave_uncompiled(monkeypatch)
    for name, policy in (("full", "full"), ("recent", "recent:budget=16")):
        options = BuildOptions(max_seq_len=128, max_num_seqs=2, max_num_tokens=64, kv_policy=policy)
        build_engine(TEACHER_DIR, tmp_path / name, options)
    given = ["--num-prompts", "2", "--output", str(tmp_path / "found")]
    engines = [f"{name}={tmp_path / name}" for name in ("full", "recent")]
    assert EXPERIMENT.run([*engines, *given, "--length", "60", "80"]) == 0
    rows = {(row["name"], row["length"]): row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert list(rows) == [("full", 60), ("full", 80), ("recent", 60), ("recent", 80)]
    assert all(row["num_correct"] == 2 for (name, _), row in rows.items() if name == "full")
    assert any(row["num_correct"] < 2 for (name, _), row in rows.items() if name == "recent")
    assert "| full | 80 | 2 of 2 | 34 to 100 |" in capsys.readouterr().out

    assert EXPERIMENT.run([f"recent={tmp_path / 'full'}", *given, "--length", "60"]) == 0
    later = {(row["name"], row["length"]): row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert later == {**rows, ("recent", 60): {**rows["full", 60], "name": "recent"}}
    assert EXPERIMENT.run([*engines, *given, "--length", "60", "90"]) == 1
    assert "use a smaller --length" in capsys.readouterr().err
