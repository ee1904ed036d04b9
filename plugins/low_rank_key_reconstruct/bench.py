"""Benchmarks of low_rank_key_reconstruct."""

import functools

import torch

from plugins.benchmark import DTYPES, Benchmark, Benchmarks
from plugins.low_rank_key_reconstruct import OPERATOR, low_rank_key_reconstruct


def reconstruct(
    sequences: int, keys: int, missed: float, rank: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Benchmark:
    """Sequences of 8192 keys of which `keys` are selected per head, a share of them missed, in chunks of 8;
    the floor is the matrix product of those."""
    u = torch.randn(sequences * 8192, rank).to(dtype)
    sv = torch.randn(sequences, kv_heads, rank, head_dim).to(dtype)
    chunks = torch.randint(0, len(u) // 8, (sequences * keys // 8, 1, kv_heads))
    positions = (chunks * 8 + torch.arange(8)[:, None]).view(-1, kv_heads).int()
    absent = torch.rand(chunks.shape).repeat(1, 8, 1).view(-1, kv_heads) >= missed
    rows = positions.masked_fill(absent, -1)
    angle = torch.rand(len(u), head_dim // 2)
    starts = torch.arange(0, sequences * keys + 1, keys).int()
    args = (u, sv, starts, rows, positions, angle.cos(), angle.sin())
    runs = {
        "kvforge_ms": lambda: low_rank_key_reconstruct(*args),
        "reference_ms": lambda: OPERATOR.reference(*args),
    }
    flops = 2 * int((~absent).sum()) * rank * head_dim
    case = (
        f"{sequences}x{keys} keys {missed:.0%} missed rank {rank} kv heads {kv_heads} dim {head_dim} {str(dtype)[6:]}"
    )
    return Benchmark(case, runs, flops=flops, dtype=dtype)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in DTYPES:
        for sequences, keys, missed, head_dim in ((1, 2048, 1.0, 128), (8, 2048, 0.4, 128), (8, 256, 0.4, 64)):
            yield "reconstruct", functools.partial(reconstruct, sequences, keys, missed, 160, 8, head_dim, dtype)
