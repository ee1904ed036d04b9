"""A plan as text."""

from collections.abc import Sequence
from typing import Any

from kvforge.common.byte_sizes import format_bytes
from kvforge.common.text_table import align
from kvforge.planning.policy_report import describe_policy

_HEAD = ("", "K,V", "Q,O", "MLP", "attention", "total", "relative", "output token", "KV B/token", "reduction", "max")
_SPEEDUP = "speed-up"


def describe(plan: dict[str, Any]) -> str:
    """Return the tables of a plan: costs per token, then what fits, what a KV policy keeps, then the rate and
    the break-even."""
    count = plan["num_parameters"]
    parameters = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    title = (
        f"{plan['model']}: {parameters} parameters, {plan['num_layers']} layers, "
        f"{plan['weight_dtype']} weights, {plan['weight_bits']:.2f} bits each; requests of {plan['input_tokens']} "
        f"input and {plan['output_tokens']} output tokens"
    )
    unit, factor = _unit(plan)
    rows = [[_HEAD[0], *_HEAD[1:-1], f"{_HEAD[-1]} {_SPEEDUP}"]]
    for row in plan["variants"]:
        prompt = row["prompt_token_flops"]
        parts = [prompt[name] / factor for name in ("key_value", "query_output", "mlp", "attention", "total")]
        rows.append(
            [
                row["name"],
                *(f"{value:.2f}" for value in parts),
                f"{100 * row['relative_prefill']:.1f}%",
                f"{row['output_token_flops']['total'] / factor:.2f}",
                f"{row['kv_bytes_per_token']}",
                f"{100 * row['cache_reduction_with_scales']:.1f}%",
                f"{row['max_speedup']:.2f}x",
            ]
        )
    blocks = [title, f"{unit} per prompt token without logits, by part; KV bytes include scales\n{align(rows)}"]
    blocks.append(_reads(plan))
    if state := plan["variants"][0]["state_bytes_per_request"]:
        blocks.append(f"A state of {format_bytes(state)} besides for each request, whatever its length")
    if exact := _exact_pages(plan["variants"]):
        blocks.append(exact)
    if head := plan.get("draft_head"):
        size, each = format_bytes(head["weight_bytes"]), head["kv_bytes_per_token"]
        blocks.append(f"With a draft head ({head['kind']}): {size} of weights and {each} bytes per token more")
    if "capacity" in plan:
        blocks.append(_capacity(plan["capacity"]))
    if "ranks" in plan:
        blocks.append(_ranks(plan["ranks"]))
    if "prefixes" in plan:
        rows = [[name, f"{count:,}"] for name, count in plan["prefixes"]["tokens"].items()]
        blocks.append(f"Tokens of prompts that {plan['prefixes']['gib']:g} GiB of files keep\n{align(rows)}")
    if "kv_policy" in plan:
        blocks.append(describe_policy(plan["kv_policy"]))
    blocks += [line for line in (_throughput(plan), _break_even(plan)) if line]
    return "\n\n".join(filter(None, blocks))


def _reads(plan: dict[str, Any]) -> str:
    """What requests keep and steps read where some variant's upper layers see no prompts; else nothing."""
    if not any(row["num_anchors"] for row in plan["variants"]):
        return ""
    names = ("kv_bytes_per_request", "step_kv_bytes_read")
    rows = [[row["name"], *(format_bytes(round(row[name])) for name in names)] for row in plan["variants"]]
    return (
        f"K,V that a request keeps, and that a decode step in its middle reads\n{align([['', 'kept', 'read'], *rows])}"
    )


def _exact_pages(variants: Sequence[dict[str, Any]]) -> str:
    names = ("kv_exact_bytes_per_request", "kv_exact_bytes_per_step")
    rows = [[row["name"], *(format_bytes(row[name]) for name in names)] for row in variants if row[names[0]]]
    return f"Exact pages besides\n{align([['', 'each request', 'a step'], *rows])}" if rows else ""


def _unit(plan: dict[str, Any]) -> tuple[str, float]:
    largest = max(row["prompt_token_flops"]["total"] for row in plan["variants"])
    return next(((unit, size) for unit, size in (("GFLOP", 1e9), ("MFLOP", 1e6)) if largest >= size), ("kFLOP", 1e3))


def _capacity(memories: Sequence[dict[str, Any]]) -> str:
    """Requests that fit, one column for each memory, with the bound on combined tokens/s where there is one."""
    rows = [["", *(f"{memory['memory_gib_per_gpu']:g} GiB" for memory in memories)]]
    with_rate = "max_tokens_per_second" in memories[0]["variants"][0]
    for i, first in enumerate(memories[0]["variants"]):
        cells = [first["name"]]
        for memory in memories:
            row = memory["variants"][i]
            rate = f" ({row['max_tokens_per_second'] / 1e3:.2f}K tok/s)" if with_rate else ""
            cells.append(f"{row['requests']}{rate}" if row["requests"] else "does not fit")
        rows.append(cells)
    head = "Requests that fit at a time, by memory per GPU"
    return f"{head}{' (bound on combined tokens/s)' if with_rate else ''}\n{align(rows)}"


def _ranks(ranks: dict[str, Any]) -> str:
    """What each rank keeps, and the requests that then fit at a time, one column for each memory."""
    first = ranks["variants"][0]
    rows = [["", "weights GiB", "KV B/token", *(f"{memory} GiB" for memory in first["requests"])]]
    for row in ranks["variants"]:
        fits = (f"{count}" if count else "does not fit" for count in row["requests"].values())
        rows.append([row["name"], f"{row['weight_bytes'] / 2**30:.2f}", f"{row['kv_bytes_per_token']}", *fits])
    head = f"Each of {ranks['tensor_parallel_size']} ranks"
    return (
        f"{head}{', and requests that fit at a time, by memory per rank' if first['requests'] else ''}\n{align(rows)}"
    )


def _throughput(plan: dict[str, Any]) -> str:
    if "throughput" not in plan:
        return ""
    rate = plan["throughput"]
    share = f", {100 * rate['share_of_tflops']:.1f}% of the given rate" if "share_of_tflops" in rate else ""
    return (
        f"{rate['tokens_per_second']:g} tokens/s are {rate['normalized_tflops_per_gpu']:.1f} normalized TFLOPS per "
        f"GPU{share}"
    )


def _break_even(plan: dict[str, Any]) -> str:
    lines = []
    for row in plan["variants"]:
        if row["distillation"] and row["kv_dtype"] == plan["variants"][0]["kv_dtype"]:
            spent = row["distillation"]
            hours = f", {spent['gpu_hours']:.0f} GPU hours" if "gpu_hours" in spent else ""
            lines.append(
                f"{row['name']}: distilling with {spent['tokens'] / 1e6:.0f}M tokens ({spent['flops']:.2e} FLOP{hours})"
                f" pays for itself after {spent['break_even_prompt_tokens'] / 1e9:.2f}B prompt tokens"
            )
    return "\n".join(lines)
