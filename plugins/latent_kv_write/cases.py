"""Random cases of latent_kv_write, and the judge of a result."""

import random
from collections.abc import Sequence

import torch

from plugins.cases import DTYPES, FORMATS, PAGE_SIZES, CacheFormat, paged_pools
from plugins.rope_paged_kv_write.cases import difference

__all__ = ["difference", "random_case"]

WIDTHS = ((16, 8), (20, 6), (80, 32), (256, 64), (512, 64), (130, 2))
"""Numbers that stay and numbers that rotate."""
OWN_FORMATS = tuple(cache for cache in FORMATS if cache.dtype is None or cache.dynamic)


def random_case(
    seed: int,
    *,
    small: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
    formats: Sequence[CacheFormat] = OWN_FORMATS,
) -> tuple:
    """Arguments of `latent_kv_write`; slots are distinct, some negative, k may be a strided view."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    (rank, rope_dim), page_size = rng.choice(WIDTHS[:3] if small else WIDTHS), rng.choice(PAGE_SIZES)
    tokens, width = rng.choice((0, 1, rng.randint(2, 20 if small else 300))), rank + rope_dim
    cache = formats[seed % len(formats)]
    fused = torch.randn(tokens, 1, width + 7, generator=gen).to(rng.choice(dtypes))
    k = fused[:, :, 7:] if rng.random() < 0.5 else fused[:, :, 7:].contiguous()
    if tokens and rng.random() < 0.3:  # a row of zeros has a scale too
        k[rng.randrange(tokens)] = 0
    angle = torch.rand(tokens, rope_dim // 2, generator=gen) * 1000
    pages = tokens // page_size + rng.randint(1, 4)
    slots = torch.randperm(pages * page_size, generator=gen)[:tokens]
    slots[torch.rand(tokens, generator=gen) < rng.choice((0.0, 0.3))] = -rng.randint(1, 9)
    pool, _, scales, _ = paged_pools((pages, page_size, 1, width), cache, rng.choice(dtypes))
    return k, angle.cos(), angle.sin(), slots.int(), pool, scales
