"""What KVzap adds to a prompt: the program on a small model, without compiled graphs."""

import json
from pathlib import Path

import pytest

from perf.eviction import scored_prompts
from tests.support.sessions.by_folder import without_builds


def test_every_scorer_has_a_row_for_each_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(scored_prompts, "LLAMA_213M", scored_prompts.LLAMA_213M | sizes | heads)
    sessions = without_builds(monkeypatch, scored_prompts)
    options = ["--units", "0", "16", "--input-tokens", "320", "640", "--rounds", "2", "--clock", "cpu"]
    places = ["--work", str(tmp_path), "--output", str(tmp_path / "found")]
    monkeypatch.setattr("sys.argv", ["scored_prompts", *options, *places])
    assert scored_prompts.EXPERIMENT.run() == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["input_tokens"], row["units"]) for row in rows] == [(320, 0), (320, 16), (640, 0), (640, 16)]
    assert all(row["prompt"]["low"] <= row["prompt"]["value"] <= row["prompt"]["high"] for row in rows)
    budgets = {session.manifest.kv_policy_parameters.get("budget") for session in sessions.values()}
    assert budgets == {None, 160, 320}
