"""Random cases of seal_pages, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import bits_differ
from plugins.cases import DTYPES
from plugins.seal_pages.layout import BITS, GROUP, sealed_shapes


def sealed_pools(num_pages: int, page_size: int, kv_heads: int, head_dim: int, bits: int) -> list[Tensor]:
    """k_codes, v_codes, k_groups and v_groups of which no group is a number."""
    return [
        torch.full((num_pages, *shape), 0xA5 if dtype == torch.uint8 else float("nan"), dtype=dtype)
        for shape, dtype in sealed_shapes(page_size, kv_heads, head_dim, bits).values()
    ]


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `seal_pages`: some pages, none twice, rows that are skipped, groups of one number and of zeros."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    page_size, kv_heads = GROUP * rng.choice((1, 2, 4)), rng.randint(1, 2 if small else 4)
    head_dim, num_exact, num_pages = GROUP * rng.choice((1, 2, 3, 4)), rng.randint(1, 4), rng.randint(4, 6)
    shape, size = (num_exact, page_size, kv_heads, head_dim), 10 ** rng.uniform(-3, 2)
    exact = [torch.randn(shape, generator=gen) * size for _ in "kv"]
    for x in exact:
        x[:, :GROUP, :, : head_dim // 2] = rng.choice((0.0, 3.7, -1e-4))
    dtype = rng.choice(dtypes)
    pages = rng.sample(range(num_pages), min(num_exact, num_pages))
    rows = [(-1 if rng.random() < 0.3 else index, page) for index, page in enumerate(pages)]
    seal = torch.tensor([(-5, 10**6), *rows], dtype=torch.int32)
    return (
        *(x.to(dtype) for x in exact),
        seal,
        *sealed_pools(num_pages, page_size, kv_heads, head_dim, rng.choice(BITS)),
    )


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Codes and groups are the reference's bit for bit, and other pages are left alone."""
    return next((wrong for pair in zip(got, want, strict=True) if (wrong := bits_differ(*pair))), None)
