"""A plan as a figure."""

from pathlib import Path
from typing import Any

from kvforge.figures import new_figure, save_figure

_PARTS = {"attention": "attention", "mlp": "MLP", "query_output": "Q,O", "key_value": "K,V"}


def plot_plan(plan: dict[str, Any], path: Path) -> None:
    """Write the FLOPs of a prompt token by part, and the maximum speed-up over input tokens per output token.

    Raises:
        KvforgeError: matplotlib is missing or cannot write this kind of file.
    """
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    first = plan["variants"][0]["kv_dtype"]
    rows = [row for row in plan["variants"] if row["kv_dtype"] == first]
    names = [row["name"].removesuffix(f", {first}") for row in rows]
    begin = [0.0] * len(rows)
    for part, label in _PARTS.items():
        values = [row["prompt_token_flops"][part] / 1e9 for row in rows]
        left.barh(names, values, left=begin, label=label)
        begin = [a + b for a, b in zip(begin, values, strict=True)]
    left.invert_yaxis()
    left.set(xlabel=f"GFLOP per prompt token, {plan['input_tokens']} tokens")
    left.legend(fontsize=8)
    for name, row in zip(names, rows, strict=True):
        curve = row["max_speedup_by_ratio"]
        right.plot([int(ratio) for ratio in curve], list(curve.values()), marker=".", label=name)
    right.set(xscale="log", xlabel="input tokens per output token", ylabel="maximum speed-up given decode")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.suptitle(plan["model"])
    save_figure(figure, path)
