"""The tables and the plots of ``perf.quality.swiftkv``."""

from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness.experiment import columns_table, interval, told
from perf.harness.tables import markdown_table
from perf.quality.scores import accuracy, bars, difference, percent, task_columns
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
    return {
        **{name: cell[name] for name in ("variant", "prefill_reduction", "kv_reduction", "fidelity", "steps")},
        **accuracy(cell),
        "versus_teacher": difference(teacher, cell),
    }


def summarised(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows by the variants' slugs, the teacher's among them."""
    return {slug: summarise(cell, cells[TEACHER.slug]) for slug, cell in cells.items()}


def _table(variants: tuple[Variant, ...], rows: dict[str, dict[str, Any]]) -> str:
    columns = (
        ("variant", "name"), ("prefill −%", "prefill_reduction", ".1f", 100), ("cache −%", "kv_reduction", ".1f", 100),
        ("steps", "steps"), ("KL per token", lambda row: interval(row["fidelity"]["kl"], 4)),
        ("agreement %", lambda row: percent(row["fidelity"]["agreement"], "value", 2)), ("exact match %", percent),
        ("vs no cut", lambda row: percent(row["versus_teacher"], "difference", sign="+")),
        *task_columns(rows[TEACHER.slug]["tasks"]),
    )  # fmt: skip
    return columns_table(columns, [rows[v.slug] | {"name": v.name} for v in variants if v.slug in rows])


def reached(curve: list[tuple[int, float]], target: float) -> int | None:
    """Return the first step at which the held-out KL is at most ``target``; None where it never is."""
    return next((step for step, value in curve if value <= target), None)


def _steps_table(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Return, per model and init, the held-out KL before and after, and the step that reached ``mean``'s last KL."""
    lines = []
    for variant in TABLES["inits"]:
        if variant.slug not in curves or not variant.distilled:
            continue
        mean = next(v for v in TABLES["inits"] if v.distilled and v.init == "mean" and v.cut == variant.cut)
        if mean.slug not in curves:
            continue
        curve, step = curves[variant.slug], reached(curves[variant.slug], curves[mean.slug][-1][1])
        shown = "not reached" if step is None else str(step)
        base = f"cut {variant.cut}, {variant.group_size}-way"
        lines.append([base, variant.init, f"{curve[0][1]:.4f}", f"{curve[-1][1]:.4f}", shown])
    head = ["model", "init", "KL at step 0", "KL at the end", "first step at or below the last KL of mean"]
    return markdown_table(head, lines)


def markdown(report: dict[str, Any]) -> str:
    """Return the tables with their explanation."""
    rows, teacher = report["rows"], report["rows"][TEACHER.slug]
    parts = [
        "# What rewiring and distillation cost in quality",
        told(report),
        f"The tiny teacher and its students in bf16 engines. Exact match: {teacher['num_prompts']} prompts of "
        f"{report['prompt_tokens']} tokens ({', '.join(teacher['tasks'])}, equally many), greedy, with the 95% Wilson "
        "interval; “vs no cut” is the difference in points paired by prompt (Agresti and Min 2005). KL(teacher ‖ "
        "student) in nats and agreement of the likeliest token are means over all tokens of "
        f"{report['documents']} held-out documents, with 95% bootstrap intervals over documents. A distillation is "
        f"{report['steps']} steps of {report['tokens_per_step']} tokens on {report['device']}, one seed; 0 steps is "
        "none.",
    ]
    whole = [name for name, variants in TABLES.items() if all(variant.slug in rows for variant in variants)]
    for name in whole:
        parts += [f"## {TITLES[name]}", _table(TABLES[name], rows)]
    if "inits" in whole:
        parts += ["## Steps to the same KL", _steps_table(report["curves"])]
    return "\n\n".join(parts) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Left: exact match of the reduction table. Middle: KL of every table's rows. Right: held-out KL over steps."""
    rows, curves = report["rows"], report["curves"]
    figure = new_figure(16, 5.2)
    axes = figure.subplots(1, 3)
    shown = [variant for variant in TABLES["reduction"] + TABLES["recovery"] if variant.slug in rows]
    names = [variant.name for variant in shown]
    chosen = [rows[variant.slug] for variant in shown]
    _bars(axes[0], names, chosen, "accuracy", 100)
    _bars(axes[1], names, [row["fidelity"]["kl"] for row in chosen], "value", 1)
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
    save_figure(figure, path)


def _bars(axes: Any, names: list[str], rows: list[dict[str, Any]], name: str, factor: float) -> None:
    bars(axes, range(len(names)), rows, name, across=True, factor=factor)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
