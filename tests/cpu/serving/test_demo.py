"""The demo's questions, its verdict and its table."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.demo import streamed
from kvforge.demo.needles import LENGTHS, make_questions
from kvforge.demo.report import ModelReport, comparison_table, make_report, note_of_load, note_of_pairs
from kvforge.demo.run import STUDENT, TEACHER, find_problems, run_demo
from kvforge.demo.streamed import StreamedAnswer, StreamedRun, ask_in_turns
from kvforge.tasks.prompt import Example
from tests.support.sessions.fake import fake_manifest


def report(name: str, accuracy: float = 1.0, different: int = 0) -> ModelReport:
    return ModelReport(name, accuracy, different, 13.5e6, 4096.0, 1000.0)


def test_questions_cover_all_lengths_and_hold_their_answer() -> None:
    questions = make_questions(lambda text: len(text.split()), 23, seed=1)
    assert len({question.prompt for question in questions}) == 23
    for index, question in enumerate(questions):
        words = len(question.prompt.split())
        assert LENGTHS[index % len(LENGTHS)] - 30 < words < LENGTHS[index % len(LENGTHS)]
        assert question.answer in question.prompt


def test_report_counts_right_answers_and_differences() -> None:
    questions = [Example("q1", "1234"), Example("q2", "5678"), Example("q3", "9999")]
    answers = tuple(
        StreamedAnswer(text, ttft, 100, 10) for text, ttft in ((" 1234. A", 1.0), (" 5679.", 2.0), (" 9999", 9.0))
    )
    got = make_report(
        "m", fake_manifest(), 4096.0, questions, StreamedRun(answers, 2.0), [" 1234. A", " 5679.", " 9998"]
    )
    assert got.accuracy == pytest.approx(2 / 3)
    assert (got.num_different_offline, got.tokens_per_second) == (1, 165.0)
    assert got.flops_per_token > 0


def test_verdict() -> None:
    assert find_problems(TEACHER, report("teacher")) == []
    assert "teacher answered 88% right, at least 90% is due" in find_problems(TEACHER, report("teacher", 0.88))
    assert find_problems(STUDENT, report("SwiftKV", 0.88)) == []
    assert len(find_problems(STUDENT, report("SwiftKV", 0.5, different=2))) == 2


def test_table_has_a_row_per_quantity_and_aligned_columns() -> None:
    pairs = [(0.2, 0.1), (0.4, 0.1), (9.0, 9.0)]
    lines = comparison_table(report("teacher"), report("SwiftKV", 0.5), pairs).splitlines()
    assert len(lines) == 7
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split()[-3:] == ["100.0%", "50.0%", "0.50"]
    assert lines[-1].split()[-3:] == ["400", "100", "0.50"], "the median of ratios, whatever a slow pair took"


def test_no_models(tmp_path: Path) -> None:
    with pytest.raises(KvforgeError, match="is no checkpoint"):
        run_demo(tmp_path, tmp_path / "work", 1, 1, 0)


@pytest.mark.parametrize(
    ("ratios", "says"),
    [([0.5, 0.6, 0.7, 0.8, 2.0], ""), ([1.5] * 5, ""), ([0.5, 0.9, 1.1, 1.4, 2.0], "from 0.90 to 1.40")],
)
def test_a_spread_that_hides_the_difference_is_said(ratios: list[float], says: str) -> None:
    note = note_of_pairs([(2.0, 2.0 * ratio) for ratio in ratios])
    assert bool(note) == bool(says) and says in note


def test_two_servers_are_asked_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def ask(client: SimpleNamespace, prompt: str) -> StreamedAnswer:
        asked.append((client.url, prompt))
        return StreamedAnswer("", len(client.url) / 2, 1, 1)

    monkeypatch.setattr(streamed, "StreamingClient", lambda url: SimpleNamespace(url=url, close=lambda: None))
    monkeypatch.setattr(streamed, "_ask", ask)
    assert ask_in_turns(("a", "bb"), ["p", "q", "r"]) == [(0.5, 1.0)] * 3
    assert asked == [("a", "p"), ("bb", "p"), ("bb", "q"), ("a", "q"), ("a", "r"), ("bb", "r")]


def test_times_of_a_busy_machine_are_remarked_on() -> None:
    assert note_of_load(0.4, 2) == ""
    assert "load 7.3" in note_of_load(7.3, 2) and note_of_load(7.3, 16) == ""
