"""Random cases of attention_mass, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import bits_differ, tolerance
from plugins.attention_mass.reference import (
    BELOW,
    SUM_AND_SQUARES,
    cached_keys,
    observes,
    state_places,
    weights,
)
from plugins.cases import (
    DTYPES,
    FORMATS,
    HEAD_DIMS,
    PAGE_SIZES,
    SMALL_HEAD_DIMS,
    CacheFormat,
    poison,
    static_scales,
)
from plugins.kv_quantization import LARGEST, dynamic_scale, quantize


def random_case(
    seed: int,
    *,
    small: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
    formats: Sequence[CacheFormat] = FORMATS,
    kind: int | None = None,
    not_finite: bool = False,
) -> tuple:
    """Arguments of `attention_mass`: permuted pages, sequences without queries, with none observed or without state
    pages, statistics that begin anywhere, equal keys in some cases."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = formats[seed % len(formats)]
    kind = rng.randrange(4) if kind is None else kind
    kv_heads, group = rng.randint(1, 2 if small else 4), rng.randint(1, 8)
    head_dim, page_size = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS), rng.choice(PAGE_SIZES)
    q_dtype = rng.choice(dtypes)
    dtype = cache.dtype or rng.choice((q_dtype, *dtypes))
    sequences = rng.randint(0, 3 if small else 5)
    most, past = (24, 60) if small else (70, 500)
    queries = [rng.choice((0, 1, 1, rng.randint(2, 16), rng.randint(17, most))) for _ in range(sequences)]
    lengths = [n + rng.choice((0, rng.randint(0, 50), rng.randint(0, past))) for n in queries]
    skipped = [rng.choice((0, 0, rng.randint(0, n), n, n + 3)) for n in queries]
    scored = [rng.choice((0, rng.randint(0, length), length, length + 2)) for length in lengths]
    observed = [n > 0 and rng.random() < 0.9 for n in queries]

    widths = [-(-length // page_size) for length in lengths]
    columns = max(1, *widths, 0) + rng.randint(0, 3)
    pages, state_pages = sum(widths) + rng.randint(1, 5), sum(widths) + rng.randint(1, 5)
    free, free_states = (torch.randperm(count, generator=gen).int() for count in (pages, state_pages))
    page_table, state_table = (
        torch.randint(-(2**31), 2**31 - 1, (sequences, columns + more), generator=gen).int() for more in (0, 1)
    )
    k_pool = poison((pages, page_size, kv_heads, head_dim), dtype)
    k_scales = poison(k_pool.shape[:3], torch.float32) if cache.dynamic else None
    k_scale = static_scales(rng, cache)[0]
    states = [poison((state_pages, page_size, kv_heads), torch.float32) for _ in range(2)]
    begin = 0
    for s, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        page_table[s, :width], state_table[s, :width] = free[begin:][:width], free_states[begin:][:width]
        begin += width
        slot = torch.arange(length)
        place = page_table[s, slot // page_size].long(), slot % page_size
        value = torch.randn(length, kv_heads, head_dim, generator=gen)
        if rng.random() < 0.1:  # every slot gets the same, which is not below the mean but for rounding
            value = value[:1].expand_as(value)
        if dtype not in LARGEST:
            k_pool[place] = value.to(dtype)
        elif k_scales is None:
            k_pool[place] = quantize(value, k_scale, dtype)
        else:
            k_scales[place] = dynamic_scale(value, dtype)
            k_pool[place] = quantize(value, k_scales[place][..., None], dtype)
        known = slot[: scored[s]]
        for state in states:
            count = torch.randint(0, 9, (len(known), kv_heads), generator=gen).float()
            past_mass = count if kind == BELOW else count * torch.rand(count.shape, generator=gen)
            state[state_table[s, known // page_size].long(), known % page_size] = past_mass
        if not observed[s]:
            state_table[s, 0] = -rng.randint(1, 9)
    heads = kv_heads * group
    q = torch.randn(sum(queries), heads + 2 * kv_heads, head_dim, generator=gen) * rng.choice((1.0, 1.0, 3.0))
    q = q.to(q_dtype)
    q = q[:, :heads] if rng.random() < 0.5 else q[:, :heads].contiguous()
    if not_finite and len(q):
        q[len(q) // 2, 0, 0] = rng.choice((float("nan"), float("inf")))
    ints = [torch.tensor(x, dtype=torch.int32) for x in (lengths, skipped, scored)]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    squares = states[1] if kind == SUM_AND_SQUARES else None
    step = (starts, ints[0], page_table, state_table, *ints[1:])
    return q, k_pool, *step, head_dim**-0.5, kind, states[0], squares, k_scales, k_scale


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Statistics agree but for the rounding of logits and sums, a count also but for weights that may be on either
    side of the mean; whatever else is in the memory has its bits.

    A logit sums head_dim products, and its error is relative to the length of q times that of k; a weight has, relative
    to itself, the error of its logit and that of a sum over the slots, and statistics the error of a sum over the
    queries.
    """
    q, k_pool, starts, lengths, table, state_table, skipped, _, scale, kind, _, _, k_scales, k_scale = args
    untouched = torch.ones(want[0].shape[:2], dtype=torch.bool)
    for s in range(len(lengths)):
        if not observes(starts, state_table, skipped, s):
            continue
        places = state_places(lengths, state_table, k_pool.shape[1], s)
        untouched[places] = False
        keys = cached_keys(k_pool, k_scales, k_scale, lengths, table, s)
        begin, end = int(starts[s] + skipped[s]), int(starts[s + 1])
        longest = scale * float(q[begin:end].float().norm(dim=-1).nan_to_num(0, 0).max() * keys.norm(dim=-1).max())
        near = 2 * tolerance(torch.float32, q.shape[2] + len(keys) + end - begin) * max(1.0, longest)
        doubtful = torch.zeros(len(keys), keys.shape[1])
        if kind == BELOW:
            for w in weights(q, keys, starts, skipped, scale, s):
                doubtful[: len(w)] += (w * len(w) - 1).abs() <= near
        for ours, theirs in zip(got, want, strict=True):
            x, y = ours[places], theirs[places]
            if wrong := bits_differ(x.isnan(), y.isnan()):
                return f"sequence {s}: {wrong}"
            allowed = doubtful if kind == BELOW else near * y.nan_to_num(0).abs().amax(0)
            error = (x - y).nan_to_num(0).abs() - allowed
            if (error > 0).any():
                return f"sequence {s} kind {kind}: {float(error.max())} beyond what rounding explains"
    return next(
        (wrong for x, y in zip(got, want, strict=True) if (wrong := bits_differ(x[untouched], y[untouched]))), None
    )
