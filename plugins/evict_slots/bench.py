"""Benchmarks of evict_slots."""

import functools

import torch

from plugins.benchmark import DTYPES, PAGE_SIZE, Benchmark, Benchmarks, caches, on_cache
from plugins.evict_slots import evict_slots

SHAPES = ((24, 513, 512, 4, 64), (24, 512, 448, 4, 64), (24, 2048, 512, 4, 64))
"""Sequences, slots, those that stay, KV heads, head dim."""


def evict(
    sequences: int, slots: int, keep: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: str
) -> Benchmark:
    """All but one step's slots are sealed. The floor is the scores, and the rows that move, read and written."""
    width = -(-slots // PAGE_SIZE)
    pages = sequences * width
    tables = [torch.randperm(pages).view(sequences, width).int() for _ in range(2)]
    shape = (pages, PAGE_SIZE, kv_heads)
    values = (torch.randn(*shape, head_dim).to(dtype) for _ in "kv")
    (k_pool, k_scales), (v_pool, v_scales) = caches(values, kv_dtype)
    numbers = [torch.full((sequences,), n, dtype=torch.int32) for n in (keep, slots, min(keep, slots - 1), 0)]
    score, mass = torch.rand(sequences, kv_heads, slots), torch.rand(shape)
    slot = torch.arange(slots)
    position = torch.zeros(shape, dtype=torch.int32)
    for table in tables[1]:
        position[table[slot // PAGE_SIZE], slot % PAGE_SIZE] = slot[:, None].int()
    args = (score, *numbers, *tables, position, k_pool, v_pool, k_scales, v_scales, mass)
    evicted = score.argsort(-1)[..., : slots - keep]
    row = 2 * head_dim * k_pool.dtype.itemsize + 8 + (0 if k_scales is None else 8)
    return Benchmark(
        f"{sequences}x{slots} keep {keep} kv heads {kv_heads} dim {head_dim} {str(dtype)[6:]}{on_cache(kv_dtype)}",
        {"kvforge_ms": lambda: evict_slots(*args)},
        num_bytes=score.nbytes + 2 * row * int((evicted < keep).sum()),
    )


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in DTYPES:
        for kv_dtype in kv_dtypes:
            for shape in SHAPES:
                yield "evict", functools.partial(evict, *shape, dtype, kv_dtype)
