"""Differences, tables and figure of ``perf.quality.ablations``."""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness.tables import markdown_table
from perf.quality.swiftkv_report import reached

Curve = Sequence[Sequence[float]]
"""(step, held-out KL in nats per token) of one student."""
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t at 97.5% by degrees of freedom; more than nine have the last."""
RECOVERED = 0.1
"""A student has recovered where its KL is this part of what it was before distillation."""


def interval_of_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of at least two values and its 95% interval by Student's t."""
    middle, degrees = mean(values), len(values) - 1
    half = T_95[min(degrees, max(T_95))] * stdev(values) / sqrt(len(values))
    return middle, middle - half, middle + half


def compared(curves: Mapping[str, Sequence[Curve]]) -> list[dict[str, Any]]:
    """Return a row for each variant of an ablation: its last KL by seed, the difference from the first variant's taken
    seed by seed with its interval, and the steps in which each seed recovered."""
    base = [curve[-1][1] for curve in next(iter(curves.values()))]
    rows: list[dict[str, Any]] = []
    for name, found in curves.items():
        last = [curve[-1][1] for curve in found]
        apart = [value - other for value, other in zip(last, base, strict=True)]
        rows.append(
            {
                "variant": name,
                "before": found[0][0][1],
                "last": last,
                "difference": interval_of_mean(apart) if rows else None,
                "recovered": [reached(curve, RECOVERED * curve[0][1]) for curve in found],
                "curves": found,
            }
        )
    return rows


def _line(row: dict[str, Any], tokens_per_step: int) -> list[str]:
    difference, steps = row["difference"], row["recovered"]
    tokens = [f"{step * tokens_per_step:,}" if step is not None else "not" for step in steps]
    return [
        row["variant"],
        f"{row['before']:.4f}",
        f"{mean(row['last']):.4f}",
        ", ".join(f"{value:.4f}" for value in row["last"]),
        "" if difference is None else f"{difference[0]:+.4f} ({difference[1]:+.4f} to {difference[2]:+.4f})",
        ", ".join(tokens),
    ]


def markdown(report: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    lines = [
        "# Ablations of distillation",
        "",
        "Students of the tiny teacher, from the paper's init. KL(teacher ‖ student) in nats per token over "
        f"{report['documents']} held-out documents of all tasks, in float32, before and after {report['steps']} steps "
        f"of {report['tokens_per_step']} tokens, with seeds {', '.join(map(str, report['seeds']))}. Differences are "
        "from the first row, seed by seed, with the 95% interval of Student's t. The last column has the tokens after "
        f"which a seed's KL was at most {RECOVERED:.0%} of what it was before. {report['machine']}.",
        "",
        f"`{report['command']}`",
    ]
    head = ["variant", "KL before", "after, mean", "by seed", "minus the first row", "tokens until recovered"]
    for table in report["tables"]:
        rows = [_line(row, report["tokens_per_step"]) for row in table["rows"]]
        lines += ["", f"## {table['title']}", "", markdown_table(head, rows)]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Held-out KL over tokens of distillation: a panel for each ablation, a line for each seed."""
    tables = report["tables"]
    figure = new_figure(5.2 * len(tables), 4.6)
    for panel, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        for i, row in enumerate(table["rows"]):
            for seed, curve in enumerate(row["curves"]):
                tokens = [step * report["tokens_per_step"] for step, _ in curve]
                label = row["variant"] if seed == 0 else None
                panel.plot(tokens, [value for _, value in curve], color=f"C{i}", lw=1, label=label)
        panel.set(yscale="log", xlabel="tokens", ylabel="held-out KL per token, nats")
        panel.set_title(table["title"], fontsize=9)
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=7)
    save_figure(figure, path)
