"""Benchmarks of selected_kv_write."""

import functools

import torch

from plugins.benchmark import DTYPES, PAGE_SIZE, Benchmark, Benchmarks
from plugins.chunk_cache_update import chunk_cache_update
from plugins.chunk_cache_update.bench import SHAPES, selections
from plugins.selected_kv_write import selected_kv_write


def write(sequences: int, places: int, missed: float, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Benchmark:
    """What brings the missed chunks of two selections in turn into the pools. The floor is the products at rank 160 or,
    if longer, the bytes."""
    chunk_size, chunks, rank = 8, 2 * places, 160
    in_turn, state = selections(sequences, places, missed, kv_heads)
    for _ in range(2):
        chunk_cache_update(next(in_turn), *state)
    lists = chunk_cache_update(next(in_turn), *state)
    pages = sequences * chunks * chunk_size // PAGE_SIZE
    tables = [torch.randperm(pages).view(sequences, -1).int() for _ in range(2)]
    u = torch.randn(pages, PAGE_SIZE, rank).to(dtype)
    sv = torch.randn(sequences, kv_heads, rank, head_dim).to(dtype)
    host_v, k_pool, v_pool = (torch.randn(pages, PAGE_SIZE, kv_heads, head_dim).to(dtype) for _ in range(3))
    angle = torch.rand(chunks * chunk_size, head_dim // 2)
    args = (u, sv, host_v, state[2], *lists, *tables, angle.cos(), angle.sin(), chunk_size, k_pool, v_pool)
    tokens = int((lists[0] >= 0).sum()) * chunk_size
    case = f"{sequences}x{places} places {missed:.0%} missed kv heads {kv_heads} rank {rank} dim {head_dim}"
    return Benchmark(
        f"{case} {str(dtype)[6:]}",
        {"kvforge_ms": lambda: selected_kv_write(*args)},
        num_bytes=tokens * (rank + 3 * head_dim) * dtype.itemsize,
        flops=2 * tokens * rank * head_dim,
        dtype=dtype,
    )


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in DTYPES:
        for shape in SHAPES:
            yield "chunks", functools.partial(write, *shape, dtype)
