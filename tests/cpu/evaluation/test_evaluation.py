"""Scoring: intervals, answer extraction, and generators that are right or wrong on purpose."""

import argparse
import json
import re

import pytest

from kvforge.commands import eval as eval_command
from kvforge.errors import KvforgeError
from kvforge.evaluation import evaluate, score_table, wilson
from kvforge.evaluation.engine import EngineGenerator
from kvforge.evaluation.score import answer_of
from kvforge.tasks import TASKS
from kvforge.tasks.prompt import make_examples
from tests.support.engines import PLAIN, EngineShelf


def count_words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]|\n", text))


def test_wilson_interval_known_values():
    assert wilson(95, 100) == pytest.approx((0.88825, 0.97846), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-4)
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
def test_a_right_generator_scores_one_and_a_wrong_one_zero(task):
    examples = make_examples(task, 299, count_words, 20, seed=0)
    answers = {example.prompt: f" {example.answer}.\nmore" for example in examples}
    right = evaluate(task, 300, 20, 0, count_words, lambda prompts: [answers[p] for p in prompts])
    assert (right.num_correct, right.accuracy, right.high) == (20, 1.0, 1.0)
    wrong = evaluate(task, 300, 20, 0, count_words, lambda prompts: [answers[p][:-8] + "x." for p in prompts])
    assert (wrong.num_correct, wrong.low) == (0, 0.0)
    half = evaluate(task, 300, 20, 0, count_words, lambda ps: [answers[p] if i % 2 else "" for i, p in enumerate(ps)])
    assert half.accuracy == 0.5
    assert f"{task:<15}" in score_table([right, half])


class FakeGenerator:
    """Answers every needle question from the text."""

    def __init__(self, engine, length, show_progress):
        del engine, length, show_progress

    count_tokens = staticmethod(count_words)

    def __call__(self, prompts):
        found = [re.search(r"What is the secret number of the (\w+ \w+)\?", prompt)[1] for prompt in prompts]
        return [re.search(rf"number of the {key} is( \d+\.)", p)[1] for key, p in zip(found, prompts, strict=True)]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    eval_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["eval", "some-engine", *arguments])
    return args.run(args)


def test_command_prints_table_and_json(monkeypatch, capsys):
    monkeypatch.setattr("kvforge.evaluation.engine.EngineGenerator", FakeGenerator)
    options = ("--task", "needle_single", "--task", "needle_multi", "--num-prompts", "5", "--length", "300")
    assert run(*options) == 0
    assert capsys.readouterr().out.count("100.0%") == 2
    assert run(*options, "--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert [(s["task"], s["num_correct"], s["length"]) for s in scores] == [
        ("needle_single", 5, 300),
        ("needle_multi", 5, 300),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "chess"), "unknown task 'chess'; choose from needle_single"),
        (("--num-prompts", "0"), "at least 1"),
        (("--task", "needle_multi", "--length", "60"), "too short for task needle_multi"),
    ],
)
def test_command_refuses_in_one_sentence(monkeypatch, arguments, message):
    monkeypatch.setattr("kvforge.evaluation.engine.EngineGenerator", FakeGenerator)
    with pytest.raises(KvforgeError, match=message):
        run(*arguments)


def test_a_failed_prompt_is_no_wrong_answer(engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the engine ends the evaluation; it is not counted as a miss."""
    generator = EngineGenerator(engines.engine(PLAIN), 16, show_progress=False)
    assert len(generator(["a"])) == 1
    monkeypatch.setattr(generator._llm.engine.runner, "run", lambda *_: 1 / 0)
    with pytest.raises(KvforgeError, match="no score"):
        generator(["a"])
