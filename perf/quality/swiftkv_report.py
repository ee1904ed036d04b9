"""The tables and the plots of ``perf.quality.swiftkv``."""

import json
import platform
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from kvforge.evaluation.paired import paired_difference
from kvforge.evaluation.score import wilson
from perf.quality.swiftkv_variants import TABLES, TEACHER, Variant

TITLES = {
    "reduction": "Prefill and cache reduction (as Table 2)",
    "recovery": "Distillation and what it trains (as Table 6)",
    "sharing": "Sharing across layers or within them (as a row of Appendix C)",
    "inits": "Where the new projections start",
}


def summarise(cell: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    """Return a row: exact match with its 95% Wilson interval, the difference from the teacher paired by prompt, and
    what was measured token by token."""
    right, reference = (list(chain.from_iterable(c["correct"].values())) for c in (cell, teacher))
    low, high = wilson(sum(right), len(right))
    return {
        **{name: cell[name] for name in ("variant", "prefill_reduction", "kv_reduction", "fidelity", "steps")},
        "num_prompts": len(right),
        "accuracy": sum(right) / len(right),
        "low": low,
        "high": high,
        "tasks": {task: sum(values) / len(values) for task, values in cell["correct"].items()},
        "versus_teacher": asdict(paired_difference(reference, right)),
    }


def _line(name: str, row: dict[str, Any]) -> str:
    paired, kl, agreement = row["versus_teacher"], row["fidelity"]["kl"], row["fidelity"]["agreement"]
    values = [
        name,
        f"{100 * row['prefill_reduction']:.1f}",
        f"{100 * row['kv_reduction']:.1f}",
        str(row["steps"]),
        f"{kl['value']:.4f} ({kl['low']:.4f} to {kl['high']:.4f})",
        f"{100 * agreement['value']:.2f} ({100 * agreement['low']:.2f} to {100 * agreement['high']:.2f})",
        f"{100 * row['accuracy']:.1f} ({100 * row['low']:.1f} to {100 * row['high']:.1f})",
        f"{100 * paired['difference']:+.1f} ({100 * paired['low']:+.1f} to {100 * paired['high']:+.1f})",
        *(f"{100 * value:.1f}" for value in row["tasks"].values()),
    ]
    return "| " + " | ".join(values) + " |"


def _table(variants: tuple[Variant, ...], rows: dict[str, dict[str, Any]]) -> list[str]:
    tasks = list(rows[TEACHER.slug]["tasks"])
    head = ["variant", "prefill −%", "cache −%", "steps", "KL per token", "agreement %", "exact match %", "vs no cut"]
    lines = ["| " + " | ".join(head + tasks) + " |", "|" + "---|" * (len(head) + len(tasks))]
    return lines + [_line(variant.name, rows[variant.slug]) for variant in variants if variant.slug in rows]


def reached(curve: list[tuple[int, float]], target: float) -> int | None:
    """Return the first step at which the held-out KL is at most ``target``; None where it never is."""
    return next((step for step, value in curve if value <= target), None)


def _steps_table(curves: dict[str, list[tuple[int, float]]]) -> list[str]:
    """Return, per model and init, the held-out KL before and after, and the step that reached ``mean``'s last KL."""
    lines = [
        "| model | init | KL at step 0 | KL at the end | first step at or below the last KL of mean |",
        "|" + "---|" * 5,
    ]
    for variant in TABLES["inits"]:
        if variant.slug not in curves or not variant.distilled:
            continue
        mean = next(v for v in TABLES["inits"] if v.distilled and v.init == "mean" and v.cut == variant.cut)
        if mean.slug not in curves:
            continue
        curve, step = curves[variant.slug], reached(curves[variant.slug], curves[mean.slug][-1][1])
        shown = "not reached" if step is None else str(step)
        base = f"cut {variant.cut}, {variant.group_size}-way"
        lines.append(f"| {base} | {variant.init} | {curve[0][1]:.4f} | {curve[-1][1]:.4f} | {shown} |")
    return lines


def markdown(
    rows: dict[str, dict[str, Any]], curves: dict[str, list[tuple[int, float]]], settings: dict[str, Any]
) -> str:
    """Return the tables with their explanation."""
    num = rows[TEACHER.slug]["num_prompts"]
    lines = [
        "# What rewiring and distillation cost in quality",
        "",
        f"The tiny teacher and its students in bf16 engines. Exact match: {num} prompts of "
        f"{settings['prompt_tokens']} tokens ({', '.join(rows[TEACHER.slug]['tasks'])}, equally many), greedy, with "
        "the 95% Wilson interval; “vs no cut” is the difference in points paired by prompt (Agresti and Min 2005). "
        f"KL(teacher ‖ student) in nats and agreement of the likeliest token are means over all tokens of "
        f"{settings['documents']} held-out documents, with 95% bootstrap intervals over documents. A distillation is "
        f"{settings['steps']} steps of {settings['tokens_per_step']} tokens; 0 steps is none.",
    ]
    for name, variants in TABLES.items():
        lines += ["", f"## {TITLES[name]}", "", *_table(variants, rows)]
    if curves:
        lines += ["", "## Steps to the same KL", "", *_steps_table(curves)]
    return "\n".join(lines) + "\n"


def plot(rows: dict[str, dict[str, Any]], curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Left: exact match of the reduction table. Middle: KL of every table's rows. Right: held-out KL over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(16, 5.2), layout="constrained")
    shown = [variant for variant in TABLES["reduction"] + TABLES["recovery"] if variant.slug in rows]
    names = [variant.name for variant in shown]
    chosen = [rows[variant.slug] for variant in shown]
    _bars(axes[0], names, [(row["accuracy"], row["low"], row["high"]) for row in chosen], 100)
    kl = [row["fidelity"]["kl"] for row in chosen]
    _bars(axes[1], names, [(entry["value"], entry["low"], entry["high"]) for entry in kl], 1)
    axes[0].set(xlabel="exact match, %")
    axes[1].set_xscale("symlog", linthresh=1e-3)
    axes[1].set(xlabel="KL(teacher ‖ student) per token, nats", xlim=(0, None))
    axes[1].set_yticklabels([])
    colours = {"copy": "tab:gray", "mean": "tab:orange", "fold": "tab:green", "ridge": "tab:blue"}
    for variant in TABLES["inits"]:
        if variant.distilled and variant.slug in curves:
            steps, values = zip(*curves[variant.slug], strict=True)
            style = "-" if variant.cut == 4 else "--"
            label = f"cut {variant.cut}, {variant.group_size}-way, {variant.init}"
            axes[2].plot(steps, values, style, color=colours[variant.init], label=label)
    axes[2].set(xlabel="distillation steps", ylabel="held-out KL per token, nats", yscale="log")
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _bars(axes: Any, names: list[str], entries: list[tuple[float, float, float]], factor: float) -> None:
    places = range(len(names))
    values = [factor * value for value, _, _ in entries]
    spread = [[factor * (v - low) for v, low, _ in entries], [factor * (high - v) for v, _, high in entries]]
    axes.errorbar(values, places, xerr=spread, fmt="o", capsize=3)
    axes.set_yticks(places, names)
    axes.invert_yaxis()


def write_report(
    cells: dict[str, dict[str, Any]], curves: dict[str, list[tuple[int, float]]], settings: dict[str, Any], output: Path
) -> None:
    """Write ``output`` with the suffixes .json, .md and .png; ``cells`` by the variants' slugs, the teacher's among
    them."""
    rows = {slug: summarise(cell, cells[TEACHER.slug]) for slug, cell in cells.items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.machine(), "torch": torch.__version__}
    content = {"command": "python -m perf.quality.swiftkv", **settings, **machine, "rows": rows, "curves": curves}
    output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    output.with_suffix(".md").write_text(markdown(rows, curves, settings), encoding="utf-8")
    plot(rows, curves, output.with_suffix(".png"))
