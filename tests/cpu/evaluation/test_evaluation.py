"""Scores of tasks: intervals, answer extraction, and answers that are right or wrong on purpose."""

import json
import re

import pytest

from kvforge.cli import main
from kvforge.common.errors import KvforgeError
from kvforge.evaluation.engine import AnsweredPrompt, EngineGenerator
from kvforge.evaluation.score import answer_of, is_correct, make_score, score_table, share_found, wilson
from kvforge.tasks import TASKS
from kvforge.tasks.prompt import Example, make_examples
from tests.support.models.engines import PLAIN, with_tokens_around
from tests.support.models.shelf import EngineShelf

PRINTED = 5e-6
"""Half a unit of the fifth digit, with which the known values are given."""


def count_words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]|\n", text))


def test_wilson_interval_known_values():
    assert wilson(95, 100) == pytest.approx((0.88825, 0.97846), abs=PRINTED)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=PRINTED)
    assert wilson(200, 200)[1] == 1.0
    with pytest.raises(ValueError):
        wilson(0, 0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" 4821.", "4821"), (" 4821", "4821"), (' "a b".\nQuestion', '"a b"'), (" 12\nmore.", "12"), ("", "")],
)
def test_answer_ends_at_full_stop_or_line_break(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_score_one_and_wrong_ones_zero(task):
    examples = make_examples(task, 299, count_words, 20, seed=0)

    def score(texts):
        pairs = list(zip(examples, texts, strict=True))
        right = [is_correct(example, text) for example, text in pairs]
        return make_score(task, 300, 0, right, [share_found(example, text) for example, text in pairs])

    right = score([f" {example.answer}.\nmore" for example in examples])
    assert (right.num_correct, right.accuracy, right.high, right.found, right.found_high) == (20, 1.0, 1.0, 1.0, 1.0)
    wrong = score([f" x{example.answer.replace(', ', ', x')}." for example in examples])
    assert (wrong.num_correct, wrong.low, wrong.found) == (0, 0.0, 0.0)
    half = score([f" {example.answer}" if i % 2 else "" for i, example in enumerate(examples)])
    assert half.accuracy == half.found == 0.5
    assert (half.low, half.high) == (half.found_low, half.found_high) == wilson(10, 20)
    table = score_table([right, half]).splitlines()
    assert table[2].split() == [task, "300", "20", *["50.0%", "29.9", "to", "70.1"] * 2]


def test_values_are_found_in_any_order_and_beside_others():
    example = Example("", "9916, 3136, 7061")
    for text, share in ((" 3136, 9916, 7061.", 1), (" 9916, 1, 2, 7061.", 2 / 3), (" 99161, 3136.", 1 / 3), ("", 0)):
        assert share_found(example, text) == pytest.approx(share)
        assert not is_correct(example, text)
    assert share_found(Example("", "7, 7, 5"), " 7, 5.") == pytest.approx(2 / 3), "what is there twice is said twice"
    low, high = wilson(20 / 3, 20)
    assert wilson(6, 20)[0] < low < 1 / 3 < high < wilson(7, 20)[1]


def answer_needles(self, prompts):
    """Answers every needle question from the text."""
    found = [re.search(r"What is the secret number of the (\w+ \w+)\?", prompt)[1] for prompt in prompts]
    texts = [re.search(rf"number of the {key} is( \d+\.)", p)[1] for key, p in zip(found, prompts, strict=True)]
    return [AnsweredPrompt([1], [2], text) for text in texts]


def test_command_prints_table_and_json(engines: EngineShelf, monkeypatch, capsys):
    monkeypatch.setattr("kvforge.evaluation.engine.EngineGenerator.answer", answer_needles)
    options = ["eval", str(engines.engine(PLAIN)), "--task", "needle_single", "--num-prompts", "5", "--length", "300"]
    assert main(options) == 0
    assert capsys.readouterr().out.count("100.0%") == 2
    assert main([*options, "--json"]) == 0
    (score,) = json.loads(capsys.readouterr().out)["scores"]
    assert (score["task"], score["num_correct"], score["length"], score["found"]) == ("needle_single", 5, 300, 1.0)


def test_a_failed_prompt_is_no_wrong_answer(engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the engine ends the evaluation; it is not counted as a miss."""
    generator = EngineGenerator(engines.engine(PLAIN), 16, show_progress=False)
    assert len(generator(["a"])) == 1
    monkeypatch.setattr(generator.llm.engine.runner, "run", lambda *_: 1 / 0)
    with pytest.raises(KvforgeError, match="no score"):
        generator(["a"])


def test_prompts_begin_as_texts_do_and_do_not_end_them(engines: EngineShelf, tmp_path) -> None:
    """With a tokenizer that puts a token before a text and one after it."""
    engine = with_tokens_around(engines.engine(PLAIN), tmp_path / "engine", before="<s>", after="</s>")
    (answer,) = EngineGenerator(engine, 16, show_progress=False).answer(["ab"])
    assert answer.prompt == [1, ord("a") + 3, ord("b") + 3]
