"""What the soak and the overload count, and what they call a failure."""

import pytest

from perf.serving.load.client import ERROR, Answer
from perf.serving.load.http import completion_text, ensemble_text
from perf.serving.overload import Phase, problems_of

REPORT = {
    "unclear": 0, "max_active": 96.0, "pss_growth_mib": {"engine": 10.0, "tritonserver": 90.0},
    "peak_before_tok_s": 600.0, "peak_after_tok_s": 500.0, "overload_tok_s": 451.0,
}  # fmt: skip


def test_nothing_to_say_when_all_is_kept() -> None:
    assert problems_of(REPORT, max_active=96, max_growth_mib=256) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unclear": 3}, "3 requests got neither"),
        ({"max_active": 97.0}, "97.0 sequences were active"),
        ({"max_active": None}, "96 is the bound"),
        ({"pss_growth_mib": {"engine": 300.0}}, "engine grew by 300 MiB"),
        ({"overload_tok_s": 440.0}, "88% of its peak"),
    ],
)
def test_each_broken_promise_is_one_sentence(change: dict, words: str) -> None:
    (problem,) = problems_of({**REPORT, **change}, max_active=96, max_growth_mib=256)
    assert words in problem


def test_only_tokens_within_the_window_count_and_refusals_go_by_their_words() -> None:
    phase = Phase(seconds=10.0)
    phase.add(Answer(0.0, [1.0, 6.0, 9.0, 12.0], [b""] * 4, ended=12.0), tokens=8, begin=5.0, end=10.0)
    phase.add(Answer(1.0, code=ERROR, message="the queue is full", ended=1.5), 8, 5.0, 10.0)
    phase.add(Answer(1.0, code="UNAVAILABLE", message="Socket closed", ended=1.5), 8, 5.0, 10.0)
    assert phase.output_tok_s == pytest.approx(0.4)  # two of four responses in ten seconds
    assert phase.outcomes == {"OK": 1, "the queue is full": 1, "UNAVAILABLE Socket closed": 1}
    assert phase.unclear == 1 and phase.max_refusal_s == 0.5


def test_answers_join_their_pieces() -> None:
    assert Answer(0.0, pieces=["é".encode()[:1], "é".encode()[1:]]).text == "é"
    assert Answer(0.0, pieces=[[1], [2, 3]]).token_ids == [1, 2, 3]
    assert ensemble_text({"text_output": "x", "model_name": "ensemble"}) == "x"
    assert completion_text({"choices": [{"text": "y"}]}) == "y" and completion_text({"choices": []}) == ""
