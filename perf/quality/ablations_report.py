"""Differences, tables and figure of ``perf.quality.ablations``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from perf.harness.experiment import columns_table, told
from perf.harness.plots import panels
from perf.quality.scores import interval_of_mean
from perf.quality.swiftkv_report import reached

Curve = Sequence[Sequence[float]]
"""(step, held-out KL in nats per token) of one student."""
RECOVERED = 0.1
"""A student has recovered where its KL is this part of what it was before distillation."""


def compared(curves: Mapping[str, Sequence[Curve]]) -> list[dict[str, Any]]:
    """Return a row for each variant of an ablation: its last KL by seed, the difference from the first variant's taken
    seed by seed with its interval, and the steps in which each seed recovered."""
    base = [curve[-1][1] for curve in next(iter(curves.values()))]
    rows: list[dict[str, Any]] = []
    for name, found in curves.items():
        last = [curve[-1][1] for curve in found]
        apart = [value - other for value, other in zip(last, base, strict=True)]
        rows.append({
            "variant": name, "before": found[0][0][1], "last": last,
            "difference": interval_of_mean(apart) if rows else None,
            "recovered": [reached(curve, RECOVERED * curve[0][1]) for curve in found], "curves": found,
        })  # fmt: skip
    return rows


def markdown(report: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    per_step = report["tokens_per_step"]

    def difference(row: dict[str, Any]) -> str:
        return "{:+.4f} ({:+.4f} to {:+.4f})".format(*row["difference"]) if row["difference"] else ""

    def recovered(row: dict[str, Any]) -> str:
        return ", ".join(f"{step * per_step:,}" if step is not None else "not" for step in row["recovered"])

    columns = (
        ("variant", "variant"), ("KL before", "before", ".4f"), ("after, mean", lambda row: mean(row["last"]), ".4f"),
        ("by seed", lambda row: ", ".join(f"{value:.4f}" for value in row["last"])),
        ("minus the first row", difference), ("tokens until recovered", recovered),
    )  # fmt: skip
    parts = [
        "# Ablations of distillation",
        told(report),
        "Students of the tiny teacher, from the paper's init. KL(teacher ‖ student) in nats per token over "
        f"{report['documents']} held-out documents of all tasks, in float32, before and after {report['steps']} steps "
        f"of {per_step} tokens, with seeds {', '.join(map(str, report['seeds']))}. Differences are from the first "
        "row, seed by seed, with the 95% interval of Student's t. The last column has the tokens after which a "
        f"seed's KL was at most {RECOVERED:.0%} of what it was before.",
    ]
    for table in report["tables"]:
        parts += [f"## {table['title']}", columns_table(columns, table["rows"])]
    return "\n\n".join(parts) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Held-out KL over tokens of distillation: a panel for each ablation, a line for each seed."""
    tables = report["tables"]
    with panels(path, 5.2 * len(tables), 4.6, len(tables), legend=7, which="both") as found:
        for panel, table in zip(found, tables, strict=True):
            for i, row in enumerate(table["rows"]):
                for seed, curve in enumerate(row["curves"]):
                    tokens = [step * report["tokens_per_step"] for step, _ in curve]
                    label = row["variant"] if seed == 0 else None
                    panel.plot(tokens, [value for _, value in curve], color=f"C{i}", lw=1, label=label)
            panel.set(yscale="log", xlabel="tokens", ylabel="held-out KL per token, nats")
            panel.set_title(table["title"], fontsize=9)
