"""Suffix decoding on agents' traffic: every drafter has a row, and the traffic repeats itself."""

import json
import random
from pathlib import Path

from kvforge.compiler.options import BuildOptions
from perf.harness.engines import STUDENT_DIR
from perf.speculation import eagle, suffix
from perf.speculation.agents import records, tool_calls
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.draft_heads import make_head
from tests.support.models.engines import SWIFTKV_FP8
from tests.support.sessions.eager import eager_session


def test_every_drafter_has_a_row(engines, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(suffix.drafting, "time", suffix.time)  # put back afterwards
    monkeypatch.setattr(suffix, "records", lambda count_tokens, seed: lambda rng: rng.choice(["a b a", "c d c"]))
    sizes = ["--requests", "5", "--num-tokens", "12", "--in-flight", "2", "--num-speculative-tokens", "2"]
    output = ["--always", "--clock", "cpu", "--output", str(tmp_path / "found")]
    monkeypatch.setattr("sys.argv", ["suffix", str(engines.engine(SWIFTKV_FP8)), *sizes, *output])
    assert suffix.EXPERIMENT.run() == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["temperature"], row["drafts"]) for row in rows] == [
        (temperature, name) for temperature in (0.0, 0.8) for name in ("ngram", "suffix")
    ]
    assert all(row["tokens_per_step"] >= 1 and row["low"] <= row["speed"] <= row["high"] for row in rows)
    assert rows[1]["tokens_per_step"] > 1 and rows[1]["drafter_us"] > 0
    assert capsys.readouterr().out.count("| suffix |") == 2


def test_traffic_is_that_of_its_seed_and_repeats_itself() -> None:
    for ask in (tool_calls, records(lambda sentence: len(sentence.split()), 0)):
        one, same, other = ([ask(rng) for _ in range(99)] for rng in map(random.Random, (0, 0, 1)))
        assert one == same != other
        assert len({text.splitlines()[-1] for text in one}) < 20 and len(set(one)) > 90


def test_a_draft_head_is_beside_the_others(tmp_path: Path, monkeypatch) -> None:
    """On a small model's session; the data to train on are texts of tasks, each time the same."""
    target = make_checkpoint(tmp_path / "target", cut=2, early_exit=True)
    options = BuildOptions(max_draft_len=2, max_num_tokens=64, draft_head=str(make_head(tmp_path / "head", target)))
    session = eager_session(target, options)
    monkeypatch.setattr(suffix.drafting, "time", suffix.time)  # put back afterwards
    monkeypatch.setattr(suffix, "load_session", lambda engine, manifest: session)
    monkeypatch.setattr(suffix, "load_manifest", lambda engine: session.manifest)
    monkeypatch.setattr(eagle, "prompts_of", lambda engine, workload: [[5, 6, 7], [8, 9]])
    sizes = ["--num-tokens", "12", "--in-flight", "2", "--num-speculative-tokens", "2"]
    monkeypatch.setattr(eagle, "engine_problem", lambda engine: None)  # the session is of no folder
    monkeypatch.setattr("sys.argv", ["eagle", str(tmp_path), *sizes, "--output", str(tmp_path / "found")])
    assert eagle.EXPERIMENT.run() == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["drafts"] for row in rows] == ["ngram", "suffix", "early_exit", "eagle3"] * 2
    assert all(row["other_texts"] == 0 for row in rows)
    monkeypatch.setattr(eagle, "NUM_ROWS", 3)
    for name in ("one", "other"):
        monkeypatch.setattr("sys.argv", ["eagle", str(STUDENT_DIR), "--write-data", str(tmp_path / name)])
        assert eagle.EXPERIMENT.run() == 0
    assert (tmp_path / "one").read_text() == (tmp_path / "other").read_text()
    assert len({row["text"] for row in map(json.loads, (tmp_path / "one").read_text().splitlines())}) == 3
