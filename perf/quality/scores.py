"""What the quality benchmarks share: options, right answers, accuracies and differences, in numbers, words and bars."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from math import sqrt
from statistics import mean, stdev
from typing import Any

from kvforge.evaluation.paired import paired_difference
from kvforge.evaluation.score import is_correct, wilson
from kvforge.tasks.prompt import Example
from perf.harness.options import Option, number, option, output, positive, seed, several, work
from perf.harness.tables import interval

TASKS = ("needle_single", "needle_multi", "variables", "list_recall", "amounts")
Cell = dict[str, Any]
"""Of one engine: at least ``correct``, by task whether each answer is right; ``texts``, by task the answers."""


def asking(name: str, num_prompts: int, length: int, kept: str, files: str = "OUTPUT.json, .md and .png") -> Option:
    """The options that all have; engines lie in runs/NAME, results in perf/results/NAME."""
    return several(
        work(f"runs/{name}", kept),
        option("--num-prompts", type=int, default=num_prompts, help="of each task (default %(default)s)"),
        option("--length", type=int, default=length, help="prompt length in tokens (default %(default)s)"),
        seed(1, "of the prompts (default 1)"), output(files, f"perf/results/{name}", as_json=False),
    )  # fmt: skip


def correct_of(examples: dict[str, list[Example]], texts: dict[str, list[str]]) -> dict[str, list[bool]]:
    """Return by task whether each text is right."""
    return {
        task: [is_correct(example, text) for example, text in zip(wanted, texts[task], strict=True)]
        for task, wanted in examples.items()
    }


def flat(by_task: dict[str, list[Any]]) -> list[Any]:
    """Return the entries of all tasks, one after the other."""
    return list(chain.from_iterable(by_task.values()))


def accuracy(cell: Cell) -> dict[str, Any]:
    """Return the exact match with its 95% Wilson interval, and that of each task."""
    right = flat(cell["correct"])
    low, high = wilson(sum(right), len(right))
    tasks = {task: sum(values) / len(values) for task, values in cell["correct"].items()}
    return {"num_prompts": len(right), "accuracy": sum(right) / len(right), "low": low, "high": high, "tasks": tasks}


def difference(first: Cell, second: Cell) -> dict[str, Any]:
    """Return the difference of two cells' right answers, paired by prompt."""
    return asdict(paired_difference(flat(first["correct"]), flat(second["correct"])))


def texts_changed(first: Cell, second: Cell) -> int:
    """Return how many texts of two cells are not the same."""
    return sum(a != b for a, b in zip(flat(first["texts"]), flat(second["texts"]), strict=True))


def percent(row: dict[str, Any], value: str = "accuracy", digits: int = 1, sign: str = "") -> str:
    """Return a number with its interval, in per cent."""
    return interval(row, digits, 100, sign, value=value)


def points(paired: dict[str, Any], digits: int = 1) -> str:
    """Return a paired difference: in points with its interval, prompts gained and lost, p."""
    words = f"+{paired['gained']} −{paired['lost']}, p {paired['p_value']:.2g}"
    return f"{percent(paired, 'difference', digits, '+')}, {words}"


def task_columns(tasks: Iterable[str]) -> list[tuple]:
    """Return a column for each task, with its exact match."""
    return [(task, lambda row, task=task: 100 * row["tasks"][task], ".1f") for task in tasks]


def against_full(results: list[Cell], keys: Sequence[str], with_texts: bool = False) -> list[dict[str, Any]]:
    """Return one row per engine, of which the second key is None for a model's full attention: accuracy with its 95%
    Wilson interval, per task, and, against the same model's full attention, the share of its accuracy, the difference
    paired by prompt, and ``with_texts`` how many texts are not the same."""
    full, rows = {result["model"]: result for result in results if result[keys[1]] is None}, []
    for result in results:
        row, other = {key: result[key] for key in ("model", *keys)} | accuracy(result), full[result["model"]]
        if other is not result:
            row["share_of_full"] = sum(flat(result["correct"])) / max(1, sum(flat(other["correct"])))
            row["versus_full"] = difference(other, result)
            row |= {"texts_changed": texts_changed(other, result)} if with_texts else {}
        rows.append(row)
    return rows


AGAINST_FULL = (
    ("exact match", percent), ("of full", "share_of_full", "{:.1f}%", 100),
    ("versus full", lambda row: points(row["versus_full"]) if "versus_full" in row else ""),
)  # fmt: skip
"""Columns of such rows."""


def spread(values: Sequence[float], rows: Sequence[dict[str, Any]], factor: float = 100) -> list[list[float]]:
    """Return the lengths of error bars to ``low`` and ``high`` of the rows."""
    pairs = list(zip(values, rows, strict=True))
    return [[factor * (v - row["low"]) for v, row in pairs], [factor * (row["high"] - v) for v, row in pairs]]


def bars(
    axes: Any, places: Sequence[float], rows: Sequence[dict[str, Any]], name: str = "accuracy", **style: Any
) -> None:
    """Draw the rows' numbers in per cent, with their intervals, over ``places``; upwards unless ``across``."""
    across, factor = style.pop("across", False), style.pop("factor", 100)
    values = [row[name] for row in rows]
    middles, lengths = [factor * value for value in values], spread(values, rows, factor)
    given = {"fmt": "o", "capsize": 3, **style}
    if across:
        axes.errorbar(middles, places, xerr=lengths, **given)
    else:
        axes.errorbar(places, middles, yerr=lengths, **given)


T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t at 97.5% by degrees of freedom; more than nine have the last."""


def interval_of_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of at least two values and its 95% interval by Student's t."""
    middle, degrees = mean(values), len(values) - 1
    half = T_95[min(degrees, max(T_95))] * stdev(values) / sqrt(len(values))
    return middle, middle - half, middle + half


TRAINED = (
    option("--seeds", nargs="+", type=positive, default=[1, 2, 3], help="at least two (default: 1 2 3)"),
    number("--jobs", 2, "made at a time (default 2)"),
)
DEVICE = option("--device", choices=("cpu", "cuda"), default="cpu", help="that distils (default %(default)s)")


def too_few_seeds(args: argparse.Namespace) -> str | None:
    """Say what ``--seeds`` lack."""
    return None if len(set(args.seeds)) > 1 else "--seeds: an interval needs at least two different seeds"
