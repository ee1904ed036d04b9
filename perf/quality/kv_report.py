"""The table and the plot of ``perf.quality.kv``."""

from pathlib import Path
from typing import Any

from kvforge.common.figures import new_figure, save_figure
from perf.quality.scores import accuracy, bars, difference, percent, points, task_columns, texts_changed

BASELINE = "bfloat16"
COLOURS = {
    "bfloat16": "tab:blue", "fp8": "tab:orange", "int8": "tab:green", "int4": "tab:purple", "k8v4": "tab:olive",
    "kivi2": "tab:brown", "fp8_static": "tab:red",
}  # fmt: skip


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


def _points(row: dict[str, Any], name: str) -> str:
    return f"{points(row[name], 2)}, {row[name]['texts_changed']} texts" if name in row else ""


def notes(report: dict[str, Any]) -> str:
    """What was asked and what is compared."""
    first = report["rows"][0]
    return (
        f"Tiny models, {first['num_prompts']} prompts of {report['prompt_tokens']} tokens "
        f"({', '.join(first['tasks'])}, equally many; seed {report['seed']}), greedy, exact match in per cent with "
        "its 95% Wilson interval. The “versus” columns pair prompt by prompt: difference in points with its 95% "
        "interval (Agresti and Min 2005), prompts gained and lost, the exact McNemar p, and how many of the "
        "generated texts are not the same. Reduction counts K and V elements against the model without a cut in "
        "bf16, as the paper does; bytes per token include the scales (a float per token, head and tensor, which "
        "weighs more here, at 64 elements a head, than at 128)."
    )


def columns(report: dict[str, Any]) -> list[tuple]:
    """Return the table's columns."""
    first = report["rows"][0]
    return [
        ("model", "model"), ("KV cache", "kv_dtype"), ("KV bytes per token", "kv_bytes_per_token"),
        ("reduction", "kv_reduction", ".2%"), ("exact match", percent),
        ("versus its bfloat16", lambda row: _points(row, "versus_bfloat16")),
        (f"versus {first['model']}, {first['kv_dtype']}", lambda row: _points(row, "versus_first")),
        *task_columns(first["tasks"]),
    ]  # fmt: skip


def plot(report: dict[str, Any], path: Path) -> None:
    """Left: accuracy over cache size. Right: paired difference from the same model's bf16 cache. 95% intervals."""
    rows = report["rows"]
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["model"] for row in rows))
    kinds = list(dict.fromkeys(row["kv_dtype"] for row in rows))
    for order, kv_dtype in enumerate(kinds):
        chosen = [row for row in rows if row["kv_dtype"] == kv_dtype]
        colour, label = COLOURS.get(kv_dtype), f"{kv_dtype} cache"
        shift = order - (len(kinds) - 1) / 2
        size = [row["kv_bytes_per_token"] + 25 * shift for row in chosen]
        bars(left, size, chosen, color=colour, label=label)
        compared = [row["versus_bfloat16"] for row in chosen if "versus_bfloat16" in row]
        places = [names.index(row["model"]) - 0.15 * shift for row in chosen if "versus_bfloat16" in row]
        if compared:
            bars(right, places, compared, "difference", across=True, color=colour, label=label)
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
