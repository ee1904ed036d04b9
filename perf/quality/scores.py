"""What the quality benchmarks share: options, right answers, accuracies and differences, in numbers, words and bars."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from kvforge.evaluation.paired import paired_difference
from kvforge.evaluation.score import is_correct, wilson
from kvforge.tasks.prompt import Example
from perf.harness.command import add_report, add_work, make_parser
from perf.harness.files import write_report

TASKS = ("needle_single", "needle_multi", "variables", "list_recall", "amounts")
Cell = dict[str, Any]
"""Of one engine: at least ``correct``, by task whether each answer is right; ``texts``, by task the answers."""


def quality_parser(
    doc: str | None, name: str, num_prompts: int, length: int, kept: str, files: str
) -> argparse.ArgumentParser:
    """Return a parser with the options that all have; engines lie in runs/NAME, results in perf/results/NAME."""
    parser = make_parser(doc)
    add_work(parser, f"runs/{name}", kept)
    parser.add_argument("--num-prompts", type=int, default=num_prompts, help="of each task (default %(default)s)")
    parser.add_argument("--length", type=int, default=length, help="prompt length in tokens (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default 1)")
    add_report(parser, files, f"perf/results/{name}", as_json=False)
    return parser


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


def interval(row: dict[str, Any], value: str = "accuracy", digits: int = 1, sign: str = "") -> str:
    """Return a number with its interval, in per cent."""
    low, middle, high = (f"{100 * row[name]:{sign}.{digits}f}" for name in ("low", value, "high"))
    return f"{middle} ({low} to {high})"


def points(paired: dict[str, Any], digits: int = 1) -> str:
    """Return a paired difference: in points with its interval, prompts gained and lost, p."""
    words = f"+{paired['gained']} −{paired['lost']}, p {paired['p_value']:.2g}"
    return f"{interval(paired, 'difference', digits, '+')}, {words}"


def spread(values: Sequence[float], rows: Sequence[dict[str, Any]], factor: float = 100) -> list[list[float]]:
    """Return the lengths of error bars to ``low`` and ``high`` of the rows."""
    pairs = list(zip(values, rows, strict=True))
    return [[factor * (v - row["low"]) for v, row in pairs], [factor * (row["high"] - v) for v, row in pairs]]


def keep_report(output: Path, content: dict[str, Any], markdown: str, plot: Callable[[Path], None]) -> None:
    """Write ``output`` with the suffixes .json, .md and .png."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_report(output, content, markdown)
    plot(output.with_suffix(".png"))
