"""KVzap beside other rules at equal bytes: the program on the tiny teacher, without compiled graphs."""

import json
from math import ceil
from pathlib import Path

import pytest

from perf.quality import learned_eviction
from tests.support.sessions.by_folder import without_builds


def test_others_keep_the_pages_that_kvzap_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a budget every prompt keeps as much, by a threshold each has a length of its own."""
    sessions = without_builds(monkeypatch, learned_eviction)
    monkeypatch.setattr(learned_eviction, "TEXTS", (4, 128))
    sizes = ["--num-prompts", "1", "--length", "200", "--model", "no cut", "--units", "0"]
    cuts, places = ["--budget", "64", "--threshold", "300"], ["--work", str(tmp_path), "--output", str(tmp_path / "a")]
    monkeypatch.setattr("sys.argv", ["learned_eviction", *sizes, *cuts, *places])
    assert learned_eviction.EXPERIMENT.run() == 0
    full, *rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (full["kept"], full["kl"]) == (1, 0)
    assert [row["rule"] for row in rows] == ["kvzap", *learned_eviction.OTHERS] * 2
    assert rows[4]["budget"] == learned_eviction.LARGEST
    manifest = next(iter(sessions.values())).manifest
    page_kib = manifest.page_bytes / 1024
    for kvzap, *others in (rows[:4], rows[4:]):
        pages = ceil(kvzap["kib"] / page_kib)
        assert 0 < kvzap["kept"] < 1 and kvzap["kl"] > 0
        assert {(row["budget"], row["kib"]) for row in others} == {(pages * manifest.page_size, pages * page_kib)}
    assert rows[0]["kib"] == 3 * page_kib  # two pages of the budget, and the end of the prompt
