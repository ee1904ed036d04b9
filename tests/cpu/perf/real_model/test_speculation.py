"""Drafts of an engine: every drafter, batch and kind has a row, and prompts are those that were asked for."""

import json
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from perf.harness.engines import tokenizer_of
from perf.real_model import speculation
from tests.support.models.chat import with_chat_template
from tests.support.models.engines import EARLY_EXIT, SWIFTKV, SWIFTKV_FP8


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "fox.txt").write_text("Once upon a time there was a fox. " * 60)
    return tmp_path


def test_every_drafter_and_batch_has_a_row(engines, texts: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("perf.speculation.prompt_lookup.MIN_PAIRS", 2)
    sizes = ["--num-prompts", "3", "--length", "24", "--num-tokens", "6", "--seconds", "0"]
    small = ["--draft-engine", str(engines.engine(SWIFTKV)), "--batch", "1", "2", "--output", str(texts / "found")]
    monkeypatch.setattr("sys.argv", ["speculation", str(engines.engine(SWIFTKV_FP8)), str(texts), *sizes, *small])
    assert speculation.EXPERIMENT.run() == 0
    rows = json.loads((texts / "found.json").read_text())["rows"]
    cases = [(row["drafts"], row["batch"], row["kind"]) for row in rows]
    assert cases == [(drafter, batch, "fox") for drafter in ("ngram", "draft model") for batch in (1, 2)]
    assert all(row["prompts"] == 3 and row["pairs"] == 2 and row["plain_tok_s"] > 0 for row in rows)
    assert rows[2]["draft_tokens"] > 0
    assert capsys.readouterr().out.count("| fox |") == 4


def test_tokens_that_exit_are_counted(engines, texts: Path, monkeypatch, capsys) -> None:
    """An engine with an exit drafts by it; what exits takes part unverified; a threshold needs an exit."""
    monkeypatch.setattr("perf.speculation.prompt_lookup.MIN_PAIRS", 2)
    drafters_of, chosen = speculation.drafters_of, dict[str, object]()

    def exits_alone(args):
        chosen.update(drafters_of(args))
        return {name: drafts for name, drafts in chosen.items() if drafts[0] is None}

    monkeypatch.setattr(speculation, "drafters_of", exits_alone)  # its graphs verify no drafts
    given = ["--num-prompts", "3", "--length", "24", "--num-tokens", "6", "--seconds", "0", "--batch", "1"]
    given += ["--exit-threshold", "1e-6", "--output", str(texts / "found")]
    monkeypatch.setattr("sys.argv", ["speculation", str(engines.engine(EARLY_EXIT)), str(texts), *given])
    assert speculation.EXPERIMENT.run() == 0 and list(chosen) == ["early exit", "exits above 1e-06"]
    (row,) = json.loads((texts / "found.json").read_text())["rows"]
    assert row["drafts"] == "exits above 1e-06" and row["share_of_exits"] == 1 and row["draft_tokens"] == 0
    assert row["pairs_with_other_tokens"] > 0
    monkeypatch.setattr("sys.argv", ["speculation", str(engines.engine(SWIFTKV_FP8)), str(texts), *given])
    assert speculation.EXPERIMENT.run() == 1
    assert "has no early exit; leave out --exit-threshold" in capsys.readouterr().err


def test_conversations_are_written_by_the_template_and_drawn(engines, texts: Path, tmp_path: Path) -> None:
    engine = with_chat_template(engines.engine(SWIFTKV), tmp_path / "chat")
    (texts / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Who?"}]}) + "\n")
    (kind, asked, params), (other, pieces, greedy) = speculation.prompts_of(engine, texts, 2, 24, 6)
    assert (kind, other) == ("answers", "fox") and len(asked) == 1 and len(pieces) == 2
    assert "Who?" in tokenizer_of(engine).decode(asked[0])
    assert params[0].temperature == speculation.TEMPERATURE and params[0].seed == 0
    assert greedy[0].temperature == 0 and len(pieces[0]) == 24


def test_a_folder_without_texts_is_refused(engines, tmp_path: Path) -> None:
    with pytest.raises(KvforgeError, match=r"has no \.txt file"):
        list(speculation.prompts_of(engines.engine(SWIFTKV), tmp_path, 2, 24, 6))
