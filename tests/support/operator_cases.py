"""The random cases of every operator, and the one judge of whether a face's result is the reference's."""

from collections.abc import Callable

import torch
from torch import Tensor

import plugins
from plugins import random_cases
from plugins.landmark_select.reference import candidates
from plugins.speculative_verify.reference import draw

CASES: dict[str, Callable[..., tuple]] = {name: getattr(random_cases, f"{name}_case") for name in plugins.OPERATORS}
SOFTMAX_ROUNDING = 8 * 2**-24
"""Relative, of a probability in float32, for each unit of its largest logit: an exponent rounded by half an epsilon of
that size moves the probability by as much. The rest is the sum, which CPUs add in orders of their own."""
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""Largest error of a float result, relative to its largest element."""


def written(name: str) -> list[int]:
    """The places among the operator's arguments of those that it writes."""
    arguments = getattr(torch.ops.kvforge, name).default._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def fresh(name: str, args: tuple) -> tuple:
    """The arguments with copies of what the operator writes, so that it leaves the case alone."""
    places = written(name)
    return tuple(x.clone() if isinstance(x, Tensor) and i in places else x for i, x in enumerate(args))


def results(name: str, args: tuple, result: Tensor | tuple[Tensor, ...] | None) -> list[Tensor]:
    """What a call gave: its results, then the arguments that it wrote."""
    given = [result] if isinstance(result, Tensor) else list(result or ())
    return given + [args[i] for i in written(name) if args[i] is not None]


def reference(name: str, args: tuple) -> list[Tensor]:
    """The reference's results, then what it wrote."""
    args = fresh(name, args)
    return results(name, args, plugins.OPERATORS[name].reference(*args))


def difference(name: str, args: tuple, got: list[Tensor], want: list[Tensor]) -> str | None:
    """None when ``got`` is what the reference allows, else what is wrong with it.

    A cache write has one right answer, bit for bit. Float results agree within ``TOLERANCE``. A drawn token may
    differ where its number is within 1e-4 of a boundary of the cumulative sum, and a selected chunk where its score is
    within 1e-4 of the least that is selected.
    """
    for one, other in zip(got, want, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{tuple(one.shape)} {one.dtype} instead of {tuple(other.shape)} {other.dtype}"
    if name == "low_rank_key_reconstruct":  # a key that is not selected is anything
        selected = args[3] >= 0
        got, want = [got[0][selected]], [want[0][selected]]
    if name == "landmark_select":
        return _chunks_differ(args, got[0], want[0])
    if name == "selected_kv_write":  # keys are computed, values copied, and all else is left alone
        before = args[-2]
        left = (want[0] == before).all(-1)
        wrong = _bits_differ(got[0][left], before[left]) or _bits_differ(got[1], want[1])
        return wrong or _values_differ(got[0], want[0])
    if name in ("rope_paged_kv_write", "chunk_cache_update"):
        return next((wrong for pair in zip(got, want, strict=True) if (wrong := _bits_differ(*pair))), None)
    if name == "speculative_verify":
        return _tokens_differ(args, got, want)
    if name == "packed_linear" and args[4] is not None:  # one rounding to bfloat16 of a normed value may differ
        got, want = [got[0].bfloat16()], [want[0].bfloat16()]
    return _values_differ(got[0], want[0])


def _chunks_differ(args: tuple, got: Tensor, want: Tensor) -> str | None:
    for s, head in (got != want).any(-1).nonzero().tolist():
        ours, theirs = (x[s, head][x[s, head] >= 0].tolist() for x in (got, want))
        swapped = {*ours} ^ {*theirs}
        wrong = f"sequence {s} head {head}: {sorted(swapped & {*ours})} instead of {sorted(swapped & {*theirs})}"
        if len(ours) != len(theirs) or sorted({*ours}) != got[s, head, : len(ours)].tolist():
            return wrong
        score = dict(zip(*(x.tolist() for x in candidates(*args[:6], args[7], s, head)), strict=True))
        least = min(score[chunk] for chunk in theirs)
        if any(abs(score.get(chunk, float("nan")) - least) >= 1e-4 for chunk in swapped) or swapped - score.keys():
            return wrong
    return None


def _bits_differ(got: Tensor, want: Tensor) -> str | None:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.view(bits) == want.view(bits)) | (got.float().isnan() & want.float().isnan())
    return None if same.all() else f"{got[~same][:3].tolist()} instead of {want[~same][:3].tolist()} in {got.dtype}"


def _values_differ(got: Tensor, want: Tensor) -> str | None:
    if not want.numel():
        return None
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30))
    return None if error < TOLERANCE[want.dtype] else f"relative error {error} in {want.dtype}"


def _tokens_differ(args: tuple, got: list[Tensor], want: list[Tensor]) -> str | None:
    for s in (got[0] != want[0]).nonzero().flatten().tolist():
        if not may_be_rejected(args, s, min(int(got[0][s]), int(want[0][s]))):
            return f"accepted {got[0].tolist()} instead of {want[0].tolist()}"
    for s in (got[1] != want[1]).nonzero().flatten().tolist():
        if not may_be_drawn(args, s, int(got[0][s]), int(got[1][s])):
            return f"sequence {s}: token {int(got[1][s])} instead of {int(want[1][s])}"
    return None


def may_be_rejected(args: tuple, s: int, draft: int) -> bool:
    """Whether rounding decides if sequence s, sampled, takes this draft: its number times the draft's probability is
    the model's within ``SOFTMAX_ROUNDING``."""
    logits, draft_ids, starts, probs, temperature, uniform = args
    place = int(starts[s]) + draft
    row, token = place + s, int(draft_ids[place])
    if temperature[s] == 0:
        return False
    p = float(torch.softmax(logits[row].double() / temperature[s].double(), dim=-1)[token])
    q = float(probs[place, token]) if probs.shape[0] else 1.0
    bound = SOFTMAX_ROUNDING * (1 + float(logits[row].abs().max() / temperature[s]))
    return abs(float(uniform[row, 0]) * q - p) <= bound * p


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
