"""The program that times attention over caches of every format counts what it reads."""

import json
from pathlib import Path

import pytest

from perf.operators import decode_cache


def test_rows_of_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    sizes = ["--sequences", "2", "--length", "64", "--kv-heads", "2", "--heads", "4", "--head-dim", "32"]
    command = ["decode_cache", *sizes, "--megabytes", "1", "--turns", "1", "--seconds", "0.01", "--cpu-time"]
    monkeypatch.setattr("sys.argv", [*command, "--output", str(tmp_path / "out")])
    assert decode_cache.EXPERIMENT.run() == 0
    rows = {row["format"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    vectors = 2 * 2 * 64 * 2  # K and V of two sequences, two heads
    assert {name: row["bytes"] for name, row in rows.items()} == {
        "bfloat16": vectors * 64,
        "fp8": vectors * 36,
        "int8": vectors * 36,
        "int4": vectors * 20,
        "k8v4": vectors * 28,
        "kivi2": vectors // 2 * 12 + vectors // 2 * 64,  # a sealed page and an exact one
        "kivi3": vectors // 2 * 16 + vectors // 2 * 64,
        "kivi4": vectors // 2 * 20 + vectors // 2 * 64,
    }
    assert rows["bfloat16"]["times_as_fast"] == 1 and all(row["ms"] > 0 for row in rows.values())
    assert "| int4 |" in capsys.readouterr().out
