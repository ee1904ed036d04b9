"""Scores of answers to tasks: exact matches and the share of the values found, with intervals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from kvforge.tasks.prompt import Example

STOP = (".", "\n")
MAX_ANSWER_TOKENS = 48


@dataclass(frozen=True)
class TaskScore:
    """Exact matches and the mean share of the values found, each with its 95% Wilson interval, all in 0..1.

    `length` counts `<s>`. The interval of a mean of shares is conservative: values in 0..1 vary at most as much as
    wholly right and wholly wrong answers with the same mean.
    """

    task: str
    length: int
    seed: int
    num_prompts: int
    num_correct: int
    accuracy: float
    low: float
    high: float
    found: float
    found_low: float
    found_high: float


def wilson(correct: float, total: int, z: float = 1.959964) -> tuple[float, float]:
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


def share_found(example: Example, text: str) -> float:
    """The share of the answer's values, apart by commas, that the generated answer has anywhere (as RULER counts)."""
    values, given = Counter(example.answer.split(", ")), Counter(answer_of(text).split(", "))
    return (values & given).total() / values.total()


def make_score(task: str, length: int, seed: int, right: Sequence[bool], shares: Sequence[float]) -> TaskScore:
    """The score of prompts of which each was answered right or not, and with a share of the values."""
    num, correct, found = len(right), sum(right), sum(shares)
    exact, mean = wilson(correct, num), wilson(found, num)
    return TaskScore(task, length, seed, num, correct, correct / num, *exact, found / num, *mean)


def score_table(scores: Sequence[TaskScore]) -> str:
    """A text table, one row per score, accuracies in per cent."""
    lines = [f"{'task':<15}{'length':>7}{'prompts':>9}{'exact match':>13}   95% interval{'found':>10}   95% interval"]
    for s in scores:
        exact = f"{100 * s.low:.1f} to {100 * s.high:.1f}"
        found = f"{100 * s.found_low:.1f} to {100 * s.found_high:.1f}"
        lines.append(
            f"{s.task:<15}{s.length:>7}{s.num_prompts:>9}{100 * s.accuracy:>12.1f}%   {exact:<13}"
            f"{100 * s.found:>8.1f}%   {found}"
        )
    return "\n".join(lines)
