"""Random cases of rope_paged_kv_write, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import bits_differ, values_differ
from plugins.cases import (
    ALL_FORMATS,
    DTYPES,
    HEAD_DIMS,
    MIXED_FORMATS,
    PAGE_SIZES,
    SMALL_HEAD_DIMS,
    CacheFormat,
    may_rotate,
    paged_pools,
    static_scales,
)
from plugins.kv_quantization import INT4, LARGEST, dequantize


def random_case(
    seed: int,
    *,
    small: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
    formats: Sequence[CacheFormat] = ALL_FORMATS,
    mixed: bool = False,
    not_finite: bool = False,
) -> tuple:
    """Arguments of `rope_paged_kv_write`; slots are distinct, some negative, k and v may be strided views. With `mixed`
    K and V of some have formats of their own, and keys of some in int8 are rotated."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads = rng.randint(1, 3 if small else 8)
    head_dim, page_size = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS), rng.choice(PAGE_SIZES)
    tokens = rng.choice((0, 1, rng.randint(2, 20 if small else 40), rng.randint(2, 20 if small else 300)))
    formats = (*formats, *MIXED_FORMATS) if mixed else formats
    cache = formats[seed % len(formats)]
    source, target = rng.choice(dtypes), rng.choice(dtypes)
    if rng.random() < 0.5:
        fused = torch.randn(tokens, 3 * kv_heads, head_dim, generator=gen).to(source)
        k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    else:
        k, v = (torch.randn(tokens, kv_heads, head_dim, generator=gen).to(source) for _ in range(2))
    if tokens and rng.random() < 0.3:  # a row of zeros has a scale too
        k[rng.randrange(tokens)] = 0
    if tokens and not_finite:
        k[-1, 0, 0], v[0, -1, -1] = float("nan"), float("inf")
    angle = torch.rand(tokens, head_dim // 2, generator=gen) * 1000
    pages = tokens // page_size + rng.randint(1, 4)
    slots = torch.randperm(pages * page_size, generator=gen)[:tokens]
    slots[torch.rand(tokens, generator=gen) < rng.choice((0.0, 0.3))] = -rng.randint(1, 9)
    shape = (pages, page_size, kv_heads, head_dim)
    pools = paged_pools(shape, cache, target)
    scales = static_scales(rng, cache)
    more = (may_rotate(cache) and rng.random() < 0.5,) if mixed else ()
    return k, v, angle.cos(), angle.sin(), slots.int(), *pools, *scales, *more


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """A cache write has one right answer, bit for bit.

    Where a compiler may fuse multiply-adds, the rotation is rounded otherwise: float elements agree as values, and few
    8-bit ones (1 % at most, those that were near the middle of two) are one step away.
    """
    pairs = zip(got, want, strict=True)
    return next((wrong for pair in pairs if (wrong := (_near(*pair) if fused else bits_differ(*pair)))), None)


def _near(got: Tensor, want: Tensor) -> str | None:
    if want.dtype not in LARGEST:
        return bits_differ(got.isnan(), want.isnan()) or values_differ(got.nan_to_num(0), want.nan_to_num(0), terms=2)
    steps = _rank(got) - _rank(want)
    if not steps.numel() or (steps.abs().max() <= 1 and (steps != 0).float().mean() <= 0.01):
        return None
    return f"{int((steps != 0).sum())} of {steps.numel()} differ, by up to {int(steps.abs().max())} steps"


def _rank(values: Tensor) -> Tensor:
    """Integers in the order of the numbers; NaN of e4m3 is one number."""
    if values.dtype == torch.int8:
        return values.int()
    if values.dtype == INT4:
        return dequantize(values, None).int()
    bits = values.view(torch.uint8).int()
    magnitude = bits & 127
    return torch.where(bits >= 128, -magnitude, magnitude).masked_fill(magnitude == 127, 1000)
