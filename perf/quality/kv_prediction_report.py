"""The tables and the plots of ``perf.quality.kv_prediction``."""

from functools import partial
from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from kvforge.training.config import TINY_STUDENT
from perf.harness.machine import machine_fields
from perf.harness.tables import markdown_table
from perf.quality.kv_prediction_maps import BIN, NUM_DOCUMENTS
from perf.quality.scores import accuracy, difference, interval, keep_report, spread

TEACHER, STUDENT = "teacher", TINY_STUDENT.distill


def summarise(cell: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    """Return a row: exact match with its 95% Wilson interval, the difference from the teacher paired by prompt, FLOPs
    relative to the teacher's, and the time to the first token."""
    return {
        **accuracy(cell),
        "versus_teacher": difference(teacher, cell),
        "flops": cell["flops"],
        "flops_share": cell["flops"] / teacher["flops"],
        "first_token_s": cell["first_token_s"],
    }


def _line(name: str, row: dict[str, Any]) -> list[Any]:
    seconds = row["first_token_s"]
    low, middle, high = (f"{1000 * seconds[each]:.1f}" for each in ("low", "value", "high"))
    return [
        name,
        f"{100 * row['flops_share']:.1f}",
        f"{middle} ({low} to {high})",
        interval(row),
        interval(row["versus_teacher"], "difference", sign="+"),
        *(f"{100 * value:.1f}" for value in row["tasks"].values()),
    ]


def markdown(rows: dict[str, dict[str, Any]], about: dict[str, Any]) -> str:
    """Return the table with its explanation."""
    trained = f"“Trained”: then {about['steps']} steps of {about['tokens_per_step']} tokens, one seed. "
    tasks = rows[TEACHER]["tasks"]
    head = ["setting", "prefill FLOPs %", "first token ms", "exact match %", "vs teacher", *tasks]
    return "\n".join(
        [
            "# Predicted caches beside SwiftKV cuts",
            "",
            f"The tiny teacher in bf16 engines. Exact match: {rows[TEACHER]['num_prompts']} held-out prompts of "
            f"{about['prompt_tokens']} tokens ({', '.join(tasks)}, equally many), greedy, with the 95% Wilson "
            "interval; “vs teacher” is the difference in points paired by prompt. The predictor's auxiliary model "
            f"begins as the teacher's first {about['auxiliary_layers']} layers, of which the last one gives its input "
            "alone; each of the teacher's layers reads the auxiliary layer at the same depth, or with “own layers” "
            "its own input and above these the last one. “Fitted”: maps by ridge regression, without training. "
            f"{trained if about['steps'] else ''}SwiftKV's distilled model is the committed student "
            f"({STUDENT.max_steps} steps of {STUDENT.batch_size * STUDENT.length} tokens), the fitted one is rewired "
            "by ridge regression. Intervals are over "
            "prompts, not over trainings. FLOPs are those of the prompt and its first token, counted; the time is the "
            f"median of {about['timed']} requests one after the other, the model's own steps included, with a 95% "
            "bootstrap interval.",
            "",
            markdown_table(head, [_line(name, row) for name, row in rows.items()]),
            "",
        ]
    )


def _plot(rows: dict[str, dict[str, Any]], maps: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    figure = new_figure(11, 9)
    grid = figure.add_gridspec(2 + len(maps) - 1, 2)
    for place, (title, value) in enumerate(
        (("prefill FLOPs, % of the teacher's", "flops_share"), ("time to first token, ms", "first_token_s"))
    ):
        axes = figure.add_subplot(grid[0, place])
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, row in rows.items():
            groups.setdefault(name.partition(",")[0], []).append(row)
        for name, some in groups.items():
            x = [100 * row[value] if place == 0 else 1000 * row[value]["value"] for row in some]
            y = [100 * row["accuracy"] for row in some]
            axes.errorbar(x, y, yerr=spread([row["accuracy"] for row in some], some), fmt="o", capsize=2, label=name)
        axes.set_xlabel(title)
        axes.set_ylabel("exact match %")
        axes.legend(fontsize=7)
    for line, (layers, both) in enumerate(maps.items(), 1):
        for place, half in enumerate(("k", "v")):
            axes = figure.add_subplot(grid[line, place])
            values = both[half]
            extent = (0, BIN * len(values[0]), len(values) - 0.5, -0.5)
            image = axes.imshow(values, aspect="auto", extent=extent, vmin=0, cmap="viridis")
            axes.set_title(f"{half.upper()}, {layers}: relative error", fontsize=9)
            axes.set_xlabel("position")
            axes.set_ylabel("layer")
            figure.colorbar(image, ax=axes)
    save_figure(figure, path)


def write_report(
    cells: dict[str, Any], maps: dict[str, dict[str, list[list[float]]]], about: dict[str, Any], output: Path
) -> None:
    """Write OUTPUT.json, .md and .png; ``maps`` by the kind of predictor."""
    rows = {name: summarise(cell, cells[TEACHER]) for name, cell in cells.items()}
    content = {**machine_fields(), **about, "documents": NUM_DOCUMENTS, "rows": rows, "differences": maps}
    keep_report(output, content, markdown(rows, about), partial(_plot, rows, maps))
