"""A plan as a figure."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.common.figures import new_figure, save_figure
from kvforge.planning.capacity import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = {"attention": "attention", "mlp": "MLP", "query_output": "Q,O", "key_value": "K,V"}


def plot_plan(plan: dict[str, Any], path: Path) -> None:
    """Write the FLOPs of a prompt token by part, the maximum speed-up over input tokens per output token, and where the
    plan has a KV policy, the bytes of a sequence over its prompt, dashed in full.

    Raises:
        KvforgeError: matplotlib is missing or cannot write this kind of file.
    """
    policy = plan.get("kv_policy")
    figure = new_figure(16 if policy else 11, 4.2)
    left, right, *more = figure.subplots(1, 3 if policy else 2)
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
    if policy:
        _plot_policy(more[0], policy)
    figure.suptitle(plan["model"])
    save_figure(figure, path)


def _plot_policy(axes: "Axes", policy: dict[str, Any]) -> None:
    for row in policy["variants"]:
        curve = row["by_context"]
        lengths = [int(length) for length in curve]
        kept = axes.plot(lengths, [sizes["device_bytes"] / GIB for sizes in curve.values()], label=row["name"])
        in_full = [sizes["full_bytes"] / GIB for sizes in curve.values()]
        axes.plot(lengths, in_full, linestyle="dashed", color=kept[0].get_color())
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="GiB on the device")
    axes.set_title(f"{policy['name']} (dashed: full)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
