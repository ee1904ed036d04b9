"""perf.serving.parsing: both answers are made whole, and what reads one is made once for each, not for each token."""

import argparse
from pathlib import Path

import pytest

from kvforge.gateway.answers import tool_answers
from perf.serving import parsing
from tests.cpu.gateway.engine_files import write_engine_files


def test_a_reader_is_made_for_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    reader = tool_answers.AnswerReader

    def counted(asked: object) -> object:
        made.append(asked)
        return reader(asked)

    monkeypatch.setattr(tool_answers, "AnswerReader", counted)
    engine = write_engine_files(tmp_path / "tiny")
    args = argparse.Namespace(engine=engine, streams=3, rounds=2, tokens_per_second=1000)
    report = parsing.make_report(args)
    assert len(made) == 3 * 2
    assert report["tokens"] > 500 and report["ratio"] > 0
    assert "| 3 |" in parsing.markdown({"command": "c", "streams": 3, "tokens_per_second": 1000, **report})
