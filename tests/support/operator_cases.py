"""The random cases of every operator, and the one judge of whether a face's result is the reference's."""

from collections.abc import Callable

import torch
from torch import Tensor

import plugins
from plugins import random_cases
from plugins.speculative_verify.reference import draw

CASES: dict[str, Callable[..., tuple]] = {name: getattr(random_cases, f"{name}_case") for name in plugins.OPERATORS}
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""Largest error of a float result, relative to its largest element."""


def fresh(args: tuple) -> tuple:
    """Copies of the tensors, so that an operator that writes them leaves the case alone; strides are kept."""
    return tuple(x.clone() if isinstance(x, Tensor) and i >= 5 else x for i, x in enumerate(args))


def reference(name: str, args: tuple) -> list[Tensor]:
    """The reference's results; of a cache write, the pools (and scales) afterwards."""
    args = fresh(args)
    result = plugins.OPERATORS[name].reference(*args)
    if result is None:
        return [pool for pool in args[5:9] if pool is not None]
    return list(result) if isinstance(result, tuple) else [result]


def difference(name: str, args: tuple, got: list[Tensor], want: list[Tensor]) -> str | None:
    """None when ``got`` is what the reference allows, else what is wrong with it.

    A cache write has one right answer, bit for bit. Float results agree within ``TOLERANCE``. A drawn token may
    differ where its number is within 1e-4 of a boundary of the cumulative sum.
    """
    for one, other in zip(got, want, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{tuple(one.shape)} {one.dtype} instead of {tuple(other.shape)} {other.dtype}"
    if name == "rope_paged_kv_write":
        return next((wrong for pair in zip(got, want, strict=True) if (wrong := _bits_differ(*pair))), None)
    if name == "speculative_verify":
        return _tokens_differ(args, got, want)
    if name == "packed_linear" and args[4] is not None:  # one rounding to bfloat16 of a normed value may differ
        got, want = [got[0].bfloat16()], [want[0].bfloat16()]
    return _values_differ(got[0], want[0])


def _bits_differ(got: Tensor, want: Tensor) -> str | None:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    same = (got.view(bits) == want.view(bits)) | (got.float().isnan() & want.float().isnan())
    return None if same.all() else f"{got[~same][:3].tolist()} instead of {want[~same][:3].tolist()} in {got.dtype}"


def _values_differ(got: Tensor, want: Tensor) -> str | None:
    if not want.numel():
        return None
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30))
    return None if error < TOLERANCE[want.dtype] else f"relative error {error} in {want.dtype}"


def _tokens_differ(args: tuple, got: list[Tensor], want: list[Tensor]) -> str | None:
    if not torch.equal(got[0], want[0]):
        return f"accepted {got[0].tolist()} instead of {want[0].tolist()}"
    for s in (got[1] != want[1]).nonzero().flatten().tolist():
        if not may_be_drawn(args, s, int(want[0][s]), int(got[1][s])):
            return f"sequence {s}: token {int(got[1][s])} instead of {int(want[1][s])}"
    return None


def may_be_drawn(args: tuple, s: int, accepted: int, token: int) -> bool:
    """Whether sequence s, sampled and having accepted so many drafts, draws ``token`` with its number moved by at most
    1e-4."""
    logits, draft_ids, starts, probs, temperature, uniform = args
    begin = int(starts[s])
    row = begin + s + accepted
    weight = torch.softmax(logits[row] / temperature[s], dim=-1)
    if accepted < int(starts[s + 1]) - begin:
        one_hot = torch.zeros_like(weight).index_fill(0, draft_ids[begin + accepted].long(), 1.0)
        residual = (weight - (probs[begin + accepted] if probs.shape[0] else one_hot)).clamp(min=0)
        weight = residual if residual.any() else weight
    near = {draw(weight, (uniform[row, 1] + shift).clamp(0, 1 - 2**-24)) for shift in (-1e-4, 1e-4)}
    return bool(temperature[s] != 0) and token in range(min(near), max(near) + 1)
