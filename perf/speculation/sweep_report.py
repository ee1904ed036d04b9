"""The table and the plot of ``perf.speculation.sweep``."""

import statistics
from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness import files
from perf.harness.tables import markdown_table

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


HEAD = ("γ", "step cost", "α", "tokens/step expected", "measured", "speed-up predicted", "measured")
MODELS_HEAD = (
    *("engine", "drafted by", "batch", "temperature", "γ", "acceptance", "tokens/step", "step ms (plain)"),
    "speed-up",
)


def _cells(cell: dict[str, Any], costs: dict[int, float]) -> list[str]:
    tokens = f"{cell['expected_tokens_per_step']:.2f}", f"{cell['tokens_per_step']:.2f}"
    speeds = f"{predicted(cell, costs):.2f}", f"{cell['speedup']:.2f}"
    return [cell["length"], f"{costs[cell['length']]:.2f}", f"{cell['acceptance']:g}", *tokens, *speeds]


def _model_cells(cell: dict[str, Any]) -> list[str]:
    return [
        *(cell["engine"], cell["draft_engine"], cell["batch"], f"{cell['temperature']:g}", cell["length"]),
        *(f"{cell['accepted'] / max(cell['drafted'], 1):.0%}", f"{cell['tokens_per_step']:.2f}"),
        *(f"{cell['step_ms']:.2f} ({cell['plain_step_ms']:.2f})", f"{cell['speedup']:.2f}"),
    ]


def markdown(report: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    lines = [
        "# Draft length and acceptance",
        "",
        f"{report['machine']}. A controlled drafter spoils right drafts with probability 1 − α and costs nothing. "
        "Expected tokens a step: (1 − α^(γ+1)) / (1 − α); predicted speed-up: these over the step's measured cost. "
        "Tokens and times are of greedy decoding after the prompts.",
        "",
    ]
    for (engine, batch), cells in groups(report["cells"]).items():
        costs = step_costs(cells)
        plain = statistics.median(cell["plain_step_ms"] for cell in cells)
        lines += [
            f"## {engine}, batch {batch}",
            "",
            f"{report['engines'][engine]}. A step without drafts takes {plain:.1f} ms.",
            "",
            markdown_table(HEAD, [_cells(cell, costs) for cell in cells], "r" * len(HEAD)),
            "",
        ]
    if report["draft_models"]:
        lines += [
            "## Draft models",
            "",
            markdown_table(MODELS_HEAD, map(_model_cells, report["draft_models"]), "ll" + "r" * (len(MODELS_HEAD) - 2)),
            "",
        ]
    lines += ["Commands:", "", *(f"    {command}" for command in report["commands"]), ""]
    return "\n".join(lines)


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
