"""Random cases of paged_attention, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import values_differ
from plugins.cases import (
    ALL_FORMATS,
    DTYPES,
    FLOAT,
    HEAD_DIMS,
    MIXED_FORMATS,
    PAGE_SIZES,
    SMALL_HEAD_DIMS,
    CacheFormat,
    may_rotate,
    paged_pools,
    static_scales,
)
from plugins.kv_quantization import LARGEST, dynamic_scale, quantize


def random_case(
    seed: int,
    *,
    q_dtype: torch.dtype | None = None,
    pool_dtype: torch.dtype | None = None,
    small: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
    formats: Sequence[CacheFormat] = ALL_FORMATS,
    mixed: bool = False,
    sinks: bool = False,
) -> tuple:
    """Arguments of `paged_attention`, of one to five sequences with permuted pages.

    A float `pool_dtype` asks for a cache of that dtype, whatever `formats` says. With `mixed` K and V of some have
    formats of their own, and keys of some in int8 are rotated. With `sinks` each head has one, of which some are as
    good as none and some take nearly all weight.
    """
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    formats = (*formats, *MIXED_FORMATS) if mixed else formats
    cache = formats[seed % len(formats)] if pool_dtype is None else FLOAT
    kv_heads, group = rng.randint(1, 2 if small else 4), rng.randint(1, 8)
    head_dim, page_size = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS), rng.choice(PAGE_SIZES)
    q_dtype = q_dtype or rng.choice(dtypes)
    default = cache.dtype or pool_dtype or rng.choice((q_dtype, *dtypes))
    window = rng.choice((0, 0, 0, 1, rng.randint(2, 40), rng.randint(41, 400)))
    sequences = rng.randint(1, 3 if small else 5)
    most, past = (24, 60) if small else (150, 700)
    queries = [rng.choice((0, 1, 1, rng.randint(2, 16), rng.randint(17, most))) for _ in range(sequences)]
    lengths = [n + rng.choice((0, rng.randint(0, 50), rng.randint(0, past))) for n in queries]

    num_tables = max(1, *(-(-length // page_size) for length in lengths)) + rng.randint(0, 3)
    pages = sum(-(-length // page_size) for length in lengths) + rng.randint(1, 5)
    free = torch.randperm(pages, generator=gen).tolist()
    page_table = torch.randint(-(2**31), 2**31 - 1, (sequences, num_tables), generator=gen)
    k_pool, v_pool, k_scales, v_scales = paged_pools((pages, page_size, kv_heads, head_dim), cache, default)
    k_scale, v_scale = static_scales(rng, cache)
    for s, (n, length) in enumerate(zip(queries, lengths, strict=True)):
        first_key = max(0, length - n - window + 1) if window else 0
        if n == 0:
            continue
        for logical in range(first_key // page_size, -(-length // page_size)):
            page_table[s, logical] = page = free.pop()
            low = max(first_key - logical * page_size, 0)
            high = min(length - logical * page_size, page_size)
            for pool, scales, scale in ((k_pool, k_scales, k_scale), (v_pool, v_scales, v_scale)):
                value = torch.randn(high - low, kv_heads, head_dim, generator=gen)
                if pool.dtype not in LARGEST:
                    pool[page, low:high] = value.to(pool.dtype)
                elif scales is None:
                    pool[page, low:high] = quantize(value, scale, pool.dtype)
                else:
                    value *= torch.rand(high - low, kv_heads, 1, generator=gen) + 0.5
                    scales[page, low:high] = dynamic_scale(value, pool.dtype)
                    pool[page, low:high] = quantize(value, scales[page, low:high, :, None], pool.dtype)
    heads = kv_heads * group
    q = torch.randn(sum(queries), heads + 2 * kv_heads, head_dim, generator=gen).to(q_dtype)
    q = q[:, :heads] if rng.random() < 0.5 else q[:, :heads].contiguous()
    query_start = torch.tensor([0, *queries]).cumsum(0).int()
    scales = (k_scales, v_scales, k_scale, v_scale)
    more: tuple = (3 * torch.randn(heads, generator=gen) + rng.choice((-200.0, 0.0, 5.0)),) if sinks else ()
    if mixed:
        more = (*(more or (None,)), may_rotate(cache) and rng.random() < 0.5)
    return (
        q,
        k_pool,
        v_pool,
        query_start,
        torch.tensor(lengths).int(),
        page_table.int(),
        head_dim**-0.5,
        window,
        *scales,
        *more,
    )


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """A result sums head_dim products for each score, and its keys."""
    return values_differ(got[0], want[0], terms=args[0].shape[2] + int(args[4].max()))
