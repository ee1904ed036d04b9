"""Suffix decoding on agents' traffic: every drafter has a row, and the traffic repeats itself."""

import json
import random
from pathlib import Path

from perf.speculation import suffix
from perf.speculation.agents import records, tool_calls
from tests.support.models.engines import SWIFTKV_FP8


def test_every_drafter_has_a_row(engines, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(suffix.drafting, "time", suffix.time)  # put back afterwards
    monkeypatch.setattr(suffix, "records", lambda count_tokens, seed: lambda rng: rng.choice(["a b a", "c d c"]))
    sizes = ["--requests", "5", "--num-tokens", "12", "--in-flight", "2", "--num-speculative-tokens", "2"]
    output = ["--clock", "cpu", "--output", str(tmp_path / "found")]
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
