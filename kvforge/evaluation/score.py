"""Runs a task through a generator and counts exact matches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from kvforge.tasks.prompt import CountTokens, Example, make_examples

Generate = Callable[[Sequence[str]], Sequence[str]]
"""Greedy continuations of prompts, long enough to hold the answer and a full stop."""

STOP = (".", "\n")
MAX_ANSWER_TOKENS = 48


@dataclass(frozen=True)
class TaskScore:
    """`accuracy` with its 95% Wilson interval [`low`, `high`], all in 0..1; `length` counts `<s>`."""

    task: str
    length: int
    seed: int
    num_prompts: int
    num_correct: int
    accuracy: float
    low: float
    high: float


def wilson(correct: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson, JASA 22, 1927). Raises ValueError for total <= 0."""
    if total <= 0:
        raise ValueError("a score needs at least one prompt")
    rate, spread = correct / total, z * z / total
    middle = (rate + spread / 2) / (1 + spread)
    half = z * sqrt(rate * (1 - rate) / total + spread / (4 * total)) / (1 + spread)
    low = 0.0 if correct == 0 else middle - half
    high = 1.0 if correct == total else middle + half
    return low, high


def answer_of(text: str) -> str:
    """The generated text up to the first full stop or line break, without surrounding spaces."""
    for mark in STOP:
        text = text.split(mark, 1)[0]
    return text.strip()


def is_correct(example: Example, text: str) -> bool:
    return answer_of(text) == example.answer


def evaluate(
    task: str, length: int, num_prompts: int, seed: int, count_tokens: CountTokens, generate: Generate
) -> TaskScore:
    """Exact match over `num_prompts` prompts of `length` tokens, of which one is left for `<s>`.

    Raises KeyError for an unknown task, ValueError when `length` cannot hold the task.
    """
    examples = make_examples(task, length - 1, count_tokens, num_prompts, seed)
    texts = generate([example.prompt for example in examples])
    right = [is_correct(example, text) for example, text in zip(examples, texts, strict=True)]
    return make_score(task, length, seed, right)


def make_score(task: str, length: int, seed: int, right: Sequence[bool]) -> TaskScore:
    """The score of prompts of which each was answered right or not."""
    low, high = wilson(sum(right), len(right))
    return TaskScore(task, length, seed, len(right), sum(right), sum(right) / len(right), low, high)


def score_table(scores: Sequence[TaskScore]) -> str:
    """A text table, one row per score, accuracies in per cent."""
    lines = [f"{'task':<15}{'length':>7}{'prompts':>9}{'exact match':>13}   95% interval"]
    for s in scores:
        interval = f"{100 * s.low:.1f} to {100 * s.high:.1f}"
        lines.append(f"{s.task:<15}{s.length:>7}{s.num_prompts:>9}{100 * s.accuracy:>12.1f}%   {interval}")
    return "\n".join(lines)
