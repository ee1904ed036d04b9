"""The table and the plot of ``perf.quality.kv``."""

from functools import partial
from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.harness.command import command_line
from perf.harness.machine import machine_fields
from perf.harness.tables import markdown_table
from perf.quality.scores import accuracy, difference, interval, keep_report, points, spread, texts_changed

BASELINE = "bfloat16"
COLOURS = {
    "bfloat16": "tab:blue",
    "fp8": "tab:orange",
    "int8": "tab:green",
    "int4": "tab:purple",
    "k8v4": "tab:olive",
    "kivi2": "tab:brown",
    "fp8_static": "tab:red",
}


def summarise(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per cell: cache size, accuracy with its 95% Wilson interval, per task, and the differences,
    paired by prompt, from the same model's bf16 cache and from the first cell."""
    baseline = {cell["model"]: cell for cell in cells if cell["kv_dtype"] == BASELINE}
    full = max(cell["kv_element_bytes_per_token"] for cell in cells)
    rows = []
    for cell in cells:
        row: dict[str, Any] = {
            **{name: cell[name] for name in ("model", "kv_dtype", "kv_bytes_per_token", "kv_element_bytes_per_token")},
            "kv_reduction": 1 - cell["kv_element_bytes_per_token"] / full,
            **accuracy(cell),
        }
        for name, other in (("versus_bfloat16", baseline.get(cell["model"])), ("versus_first", cells[0])):
            if other is not None and other is not cell:
                row[name] = difference(other, cell) | {"texts_changed": texts_changed(other, cell)}
        rows.append(row)
    return rows


def _points(paired: dict[str, Any] | None) -> str:
    return "" if paired is None else f"{points(paired, 2)}, {paired['texts_changed']} texts"


def markdown(rows: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """Return the table with its explanation."""
    tasks = list(rows[0]["tasks"])
    first = f"{rows[0]['model']}, {rows[0]['kv_dtype']}"
    head = ["model", "KV cache", "KV bytes per token", "reduction", "exact match", "versus its bfloat16"]
    head += [f"versus {first}", *tasks]
    lines = [
        "# Quality under KV compression",
        "",
        f"Tiny models, {rows[0]['num_prompts']} prompts of {settings['prompt_tokens']} tokens "
        f"({', '.join(tasks)}, equally many; seed {settings['seed']}), greedy, exact match in per cent with its 95% "
        "Wilson interval. The “versus” columns pair prompt by prompt: difference in points with its 95% interval "
        "(Agresti and Min 2005), prompts gained and lost, the exact McNemar p, and how many of the generated texts "
        "are not the same. Reduction counts K and V elements against the model without a cut in bf16, as the paper "
        "does; bytes per token include the scales (a float per token, head and tensor, which weighs more here, at 64 "
        "elements a head, than at 128).",
    ]
    table = [
        [
            *(row["model"], row["kv_dtype"], row["kv_bytes_per_token"], f"{100 * row['kv_reduction']:.2f}%"),
            *(interval(row), _points(row.get("versus_bfloat16")), _points(row.get("versus_first"))),
            *(f"{100 * row['tasks'][task]:.1f}" for task in tasks),
        ]
        for row in rows
    ]
    return "\n".join([*lines, "", markdown_table(head, table)]) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Left: accuracy over cache size. Right: paired difference from the same model's bf16 cache. 95% intervals."""
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["model"] for row in rows))
    kinds = list(dict.fromkeys(row["kv_dtype"] for row in rows))
    for order, kv_dtype in enumerate(kinds):
        chosen = [row for row in rows if row["kv_dtype"] == kv_dtype]
        colour, label = COLOURS.get(kv_dtype), f"{kv_dtype} cache"
        shift = order - (len(kinds) - 1) / 2
        size = [row["kv_bytes_per_token"] + 25 * shift for row in chosen]
        _bars(left, size, chosen, [row["accuracy"] for row in chosen], True, colour, label)
        compared = [row["versus_bfloat16"] for row in chosen if "versus_bfloat16" in row]
        places = [names.index(row["model"]) - 0.15 * shift for row in chosen if "versus_bfloat16" in row]
        _bars(right, places, compared, [entry["difference"] for entry in compared], False, colour, label)
    sizes: dict[int, list[str]] = {}
    for row in rows:
        if row["kv_dtype"] == BASELINE:
            sizes.setdefault(row["kv_bytes_per_token"], []).append(row["model"])
    for size_, models in sizes.items():
        left.annotate("\n".join(models), (size_, left.get_ylim()[0]), ha="center", va="bottom", fontsize=8)
    left.set(xlabel="KV cache, bytes per token, scales included", ylabel="exact match, %")
    right.set(xlabel="exact match minus the bf16 cache's, points", yticks=range(len(names)), yticklabels=names)
    right.invert_yaxis()
    right.axvline(0, color="black", linewidth=0.8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds), fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"Tiny models, {rows[0]['num_prompts']} prompts, 95% intervals")
    save_figure(figure, path)


def _bars(axes: Any, places: list[float], entries: list[dict], values: list[float], up: bool, colour: Any, label: str):
    """Points with their intervals, in per cent; ``up``: the value goes up, else to the right."""
    percent, lengths = [100 * value for value in values], spread(values, entries)
    style = {"fmt": "o", "capsize": 3, "color": colour, "label": label}
    if up:
        axes.errorbar(places, percent, yerr=lengths, **style)
    elif entries:
        axes.errorbar(percent, places, xerr=lengths, **style)


def write_report(cells: list[dict[str, Any]], settings: dict[str, Any], output: Path) -> None:
    """Write ``output`` with the suffixes .json, .md and .png."""
    rows = summarise(cells)
    content = {"command": command_line("perf.quality.kv"), **settings, **machine_fields(), "rows": rows}
    keep_report(output, content, markdown(rows, settings), partial(plot, rows))
