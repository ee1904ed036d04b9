"""The table and the plot of ``perf.speculation.sweep``."""

import statistics
from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness import files
from perf.harness.tables import columns_table

Cells = list[dict[str, Any]]


def step_costs(cells: Cells) -> dict[int, float]:
    """Return for each draft length what a step costs, as a multiple of one without drafts; medians over acceptances."""
    lengths = sorted({cell["length"] for cell in cells})
    return {
        length: statistics.median(cell["step_ms"] / cell["plain_step_ms"] for cell in cells if cell["length"] == length)
        for length in lengths
    }


def predicted(cell: dict[str, Any], costs: dict[int, float]) -> float:
    """Return the speed-up that the formula's tokens and the measured cost of a step give."""
    return float(cell["expected_tokens_per_step"] / costs[cell["length"]])


def groups(cells: Cells) -> dict[tuple[str, int], Cells]:
    """Return the cells by engine and batch."""
    found: dict[tuple[str, int], Cells] = {}
    for cell in cells:
        found.setdefault((cell["engine"], cell["batch"]), []).append(cell)
    return found


def columns_of(costs: dict[int, float]) -> list[tuple]:
    """Return the columns of the controlled drafter's table."""
    return [
        ("γ", "length"), ("step cost", lambda cell: costs[cell["length"]], ".2f"), ("α", "acceptance", "g"),
        ("tokens/step expected", "expected_tokens_per_step", ".2f"), ("measured", "tokens_per_step", ".2f"),
        ("speed-up predicted", lambda cell: predicted(cell, costs), ".2f"), ("measured", "speedup", ".2f"),
    ]  # fmt: skip


MODELS = (
    ("engine", "engine"), ("drafted by", "draft_engine"), ("batch", "batch"), ("temperature", "temperature", "g"),
    ("γ", "length"), ("acceptance", lambda cell: cell["accepted"] / max(cell["drafted"], 1), ".0%"),
    ("tokens/step", "tokens_per_step", ".2f"),
    ("step ms (plain)", lambda cell: f"{cell['step_ms']:.2f} ({cell['plain_step_ms']:.2f})"),
    ("speed-up", "speedup", ".2f"),
)  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    parts = [
        "# Draft length and acceptance",
        f"{report['machine']}. A controlled drafter spoils right drafts with probability 1 − α and costs nothing. "
        "Expected tokens a step: (1 − α^(γ+1)) / (1 − α); predicted speed-up: these over the step's measured cost. "
        "Tokens and times are of greedy decoding after the prompts.",
    ]
    for (engine, batch), cells in groups(report["cells"]).items():
        plain = statistics.median(cell["plain_step_ms"] for cell in cells)
        parts += [
            f"## {engine}, batch {batch}",
            f"{report['engines'][engine]}. A step without drafts takes {plain:.1f} ms.",
        ]
        parts.append(columns_table(columns_of(step_costs(cells)), cells, "rrrrrrr"))
    if report["draft_models"]:
        parts += ["## Draft models", columns_table(MODELS, report["draft_models"], "llrrrrrrr")]
    return "\n\n".join([*parts, "Commands:", "\n".join(f"    {command}" for command in report["commands"])]) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw for each engine and batch tokens a step, the step's cost and the speed-up against the draft length."""
    found = groups(report["cells"])
    figure = new_figure(12, 3.4 * len(found))
    axes = figure.subplots(len(found), 3, squeeze=False)
    for row, ((engine, batch), cells) in zip(axes, found.items(), strict=True):
        costs = step_costs(cells)
        tokens, cost, speed = row
        for index, acceptance in enumerate(sorted({cell["acceptance"] for cell in cells})):
            some = [cell for cell in cells if cell["acceptance"] == acceptance]
            lengths, colour = [cell["length"] for cell in some], f"C{index}"
            tokens.plot(lengths, [cell["expected_tokens_per_step"] for cell in some], "--", color=colour)
            tokens.plot(
                lengths, [cell["tokens_per_step"] for cell in some], "o", color=colour, label=f"α = {acceptance:g}"
            )
            speed.plot(lengths, [predicted(cell, costs) for cell in some], "--", color=colour)
            speed.plot(lengths, [cell["speedup"] for cell in some], "o", color=colour, label=f"α = {acceptance:g}")
        cost.plot(list(costs), list(costs.values()), "o-", color="black")
        cost.set_ylim(0, None)
        speed.axhline(1, color="grey", linewidth=0.8)
        titles = ("tokens a step (dashed: formula)", "cost of a step, plain = 1", "speed-up (dashed: predicted)")
        for axis, title in zip(row, titles, strict=True):
            axis.set_title(f"{engine}, batch {batch}: {title}", fontsize=9)
            axis.set_xlabel("drafts γ")
            axis.grid(alpha=0.3)
        tokens.legend(fontsize=8)
    save_figure(figure, path)


def write_report(report: dict[str, Any], output: Path) -> None:
    """Write ``output``.json, .md and, where there is something to plot, .svg."""
    files.write_report(output, report, markdown(report))
    if report["cells"]:
        plot(report, output.with_suffix(".svg"))
