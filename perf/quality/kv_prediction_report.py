"""The tables and the plots of ``perf.quality.kv_prediction``."""

from pathlib import Path
from statistics import mean
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness.tables import interval
from perf.quality.kv_prediction_maps import BIN
from perf.quality.scores import accuracy, bars, difference, interval_of_mean, percent, task_columns
from perf.training.config import TINY_STUDENT

TEACHER, STUDENT = "teacher", TINY_STUDENT.distill


def summarise(cell: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    """Return a row: exact match and the difference from the teacher, paired by prompt, with their 95% intervals, FLOPs
    relative to the teacher's, and the time to the first token.

    ``correct`` of a cell has an entry for each seed. With one the intervals are over prompts, Wilson's and
    ``paired_difference``'s; with several they are of the mean over trainings, by Student's t.
    """
    ones = [{"correct": correct} for correct in cell["correct"]]
    found = [accuracy(one) for one in ones]
    apart = [difference({"correct": teacher["correct"][0]}, one) for one in ones]
    row, versus = dict(found[0]), dict(apart[0])
    if len(ones) > 1:
        row |= _mean([each["accuracy"] for each in found], "accuracy", 0)
        row["tasks"] = {task: mean(each["tasks"][task] for each in found) for task in row["tasks"]}
        versus = _mean([each["difference"] for each in apart], "difference", -1)
    return {
        **row, "kind": cell["kind"], "by_seed": [each["accuracy"] for each in found], "versus_teacher": versus,
        "flops": cell["flops"], "flops_share": cell["flops"] / teacher["flops"], "first_token_s": cell["first_token_s"],
    }  # fmt: skip


def summarised(cells: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows by their names."""
    return {name: summarise(cell, cells[TEACHER]) for name, cell in cells.items()}


def _mean(values: list[float], name: str, least: float) -> dict[str, float]:
    middle, low, high = interval_of_mean(values)
    return {name: middle, "low": max(low, least), "high": min(high, 1.0)}


def columns(report: dict[str, Any]) -> list[tuple]:
    """Return the table's columns."""

    def first_token(row: dict[str, Any]) -> str:
        return interval(row["first_token_s"], 1, 1000)

    def by_seed(row: dict[str, Any]) -> str:
        return ", ".join(f"{100 * value:.1f}" for value in row["by_seed"]) if len(row["by_seed"]) > 1 else ""

    return [
        ("setting", "name"), ("prefill FLOPs %", "flops_share", ".1f", 100), ("first token ms", first_token),
        ("exact match %", percent), ("by seed", by_seed),
        ("vs teacher", lambda row: percent(row["versus_teacher"], "difference", sign="+")),
        *task_columns(report["rows"][TEACHER]["tasks"]),
    ]  # fmt: skip


def notes(about: dict[str, Any]) -> str:
    """What was made, asked and timed."""
    teacher = about["rows"][TEACHER]
    return (
        f"The tiny teacher in bf16 engines. Exact match: {teacher['num_prompts']} held-out prompts of "
        f"{about['prompt_tokens']} tokens ({', '.join(teacher['tasks'])}, equally many), greedy; “vs teacher” is the "
        "difference in points paired by prompt. The predictor's auxiliary model begins as the teacher's first "
        f"{about['auxiliary_layers']} layers or, “independent”, is a model of as many layers that was trained from "
        f"random weights on {about['independent_tokens']:,} tokens (“alone”: it answers by itself); its last layer "
        "gives its input alone. Each of the teacher's layers reads the auxiliary layer at the same depth, or with “own "
        "layers” its own input and above these the last one. “Fitted”: maps by ridge regression, without training. "
        f"“Trained”: then {about['steps']} steps of {about['tokens_per_step']} tokens, with seeds "
        f"{', '.join(map(str, about['seeds']))}. SwiftKV's distilled model is the committed student "
        f"({STUDENT.max_steps} steps of {STUDENT.batch_size * STUDENT.length} tokens of the same documents), the "
        "fitted one is rewired by ridge regression. 95% intervals: of trained rows of the mean over seeds, by "
        "Student's t; of the others over prompts. FLOPs are those of the prompt and its first token, counted; the "
        f"time is the median of {about['rounds']} rounds of {about['timed']} requests one after the other, the "
        "model's own steps included, with a 95% bootstrap interval."
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Exact match over FLOPs and over the time to the first token; maps of the errors by layer and position."""
    rows, maps = report["rows"], report["differences"]
    figure = new_figure(11, 4.5 + 1.5 * len(maps))
    grid = figure.add_gridspec(1 + len(maps), 2, height_ratios=[3] + [1] * len(maps))
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        groups.setdefault(row["kind"], []).append(row)
    panels = (
        ("prefill FLOPs, % of the teacher's", lambda row: 100 * row["flops_share"]),
        ("time to first token, ms", lambda row: 1000 * row["first_token_s"]["value"]),
    )
    for place, (title, value) in enumerate(panels):
        axes = figure.add_subplot(grid[0, place])
        for name, some in groups.items():
            bars(axes, list(map(value, some)), some, capsize=2, label=name)
        axes.set_xlabel(title)
        axes.set_ylabel("exact match %")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7, loc="lower right")
    largest = max(value for both in maps.values() for half in both.values() for line in half for value in line)
    for line, (layers, both) in enumerate(maps.items(), 1):
        for place, half in enumerate(("k", "v")):
            axes = figure.add_subplot(grid[line, place])
            values = both[half]
            extent = (0, BIN * len(values[0]), len(values) - 0.5, -0.5)
            image = axes.imshow(values, aspect="auto", extent=extent, vmin=0, vmax=largest, cmap="viridis")
            axes.set_title(f"{half.upper()}, {layers}: relative error", fontsize=9)
            axes.set_xlabel("position")
            axes.set_ylabel("layer")
            figure.colorbar(image, ax=axes)
    save_figure(figure, path)
