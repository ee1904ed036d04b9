"""Random operator cases on another device, and how results are compared."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plugins import random_cases
from tests.support.operator_cases import difference, may_be_drawn, results

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}
"""Largest error relative to the largest element. fp32 sums in another order than the reference."""

CASES: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "rope_paged_kv_write": lambda seed: random_cases.rope_paged_kv_write_case(seed, dtypes=FLOATS),
    "paged_attention": lambda seed: random_cases.paged_attention_case(seed, dtypes=FLOATS),
    "low_rank_key_reconstruct": lambda seed: random_cases.low_rank_key_reconstruct_case(seed, dtypes=FLOATS),
    "speculative_verify": random_cases.speculative_verify_case,
    "landmark_select": lambda seed: random_cases.landmark_select_case(seed, dtypes=FLOATS),
    "chunk_cache_update": random_cases.chunk_cache_update_case,
    "selected_kv_write": lambda seed: random_cases.selected_kv_write_case(seed, dtypes=FLOATS),
}


def moved(arguments: tuple[Any, ...], device: torch.device) -> list[Any]:
    """Copies of the arguments on ``device``; strided views keep their strides."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_contiguous():
            return value.clone().to(device)
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return copy.copy_(value)

    return [move(value) for value in arguments]


def close(got: Tensor, want: Tensor) -> str | None:
    """None, or how ``got`` differs from ``want`` by more than the dtype's tolerance; NaN equals NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
    got, want, tolerance = got.cpu().float(), want.float(), TOLERANCE[want.dtype]
    if not torch.equal(got.isnan(), want.isnan()):
        return "NaN in other places"
    error = (
        float((got - want).nan_to_num(0.0).abs().max() / want.nan_to_num(0.0).abs().max().clamp(min=1e-30))
        if want.numel()
        else 0.0
    )
    return None if error < tolerance else f"relative error {error}"


def written_cache(got: list[Any], want: list[Any]) -> str | None:
    """Compare the pools and scales that ``rope_paged_kv_write`` leaves: fp32 rotation may fuse its multiply-adds, so
    8-bit elements may differ by one step and the others by their rounding."""
    for name, ours, theirs in zip(("k_pool", "v_pool", "k_scales", "v_scales"), got[5:9], want[5:9], strict=True):
        if ours is None:
            continue
        ours = ours.cpu()
        if ours.dtype == torch.float8_e4m3fn:
            steps = _fp8_rank(ours) - _fp8_rank(theirs)
        elif ours.dtype == torch.int8:
            steps = ours.int() - theirs.int()
        else:
            difference = close(ours, theirs)
            if difference:
                return f"{name}: {difference}"
            continue
        if steps.abs().max() > 1 or (steps != 0).float().mean() > 0.01:
            return (
                f"{name}: {int((steps != 0).sum())} of {steps.numel()} differ, by up to {int(steps.abs().max())} steps"
            )
    return None


def _fp8_rank(values: Tensor) -> Tensor:
    """Integers in the order of the e4m3 numbers; NaN is one number."""
    bits = values.view(torch.uint8).int()
    magnitude = bits & 127
    return torch.where(bits >= 128, -magnitude, magnitude).masked_fill(magnitude == 127, 1000)


def verified(arguments: tuple[Any, ...], got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> str | None:
    """Compare ``speculative_verify``'s results: a drawn token may differ where the target is within 1e-4 of a boundary
    of the cumulative sum, and so may an acceptance whose two sides are equal to 1e-5."""
    logits, draft_ids, starts, probs, temperature, uniform = arguments
    accepted, tokens = (tensor.cpu() for tensor in got)
    for s in range(len(temperature)):
        begin, count = int(starts[s]), int(want[0][s])
        ours = int(accepted[s])
        if ours != count:
            j = min(ours, count)
            row = begin + s + j
            p = torch.softmax(logits[row] / temperature[s], -1)[draft_ids[begin + j]]
            q = probs[begin + j, draft_ids[begin + j]] if probs.shape[0] else torch.tensor(1.0)
            if temperature[s] == 0 or abs(float(uniform[row, 0] * q - p)) > 1e-5:
                return f"sequence {s}: accepted {ours} instead of {count}"
            continue
        token = int(tokens[s])
        if token != int(want[1][s]) and not may_be_drawn(arguments, s, count, token):
            return f"sequence {s}: token {token} instead of {int(want[1][s])}"
    return None


def check(name: str, seed: int, device: torch.device, operator: Callable[..., Any]) -> str | None:
    """Run one random case of ``operator`` on ``device`` and return how it differs from the reference, or None."""
    import plugins

    arguments = CASES[name](seed)
    ours, theirs = moved(arguments, device), moved(arguments, torch.device("cpu"))
    got, want = operator(*ours), plugins.OPERATORS[name].reference(*theirs)
    if name == "rope_paged_kv_write":
        return written_cache(ours, theirs)
    if name == "speculative_verify":
        return verified(arguments, got, want)
    if name in ("landmark_select", "chunk_cache_update", "selected_kv_write"):
        ours, theirs = results(name, tuple(ours), got), results(name, tuple(theirs), want)
        return difference(name, arguments, [x.cpu() for x in ours], theirs)
    return close(got, want)
