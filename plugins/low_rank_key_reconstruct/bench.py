"""Benchmarks of low_rank_key_reconstruct."""

import functools

import torch

from plugins.benchmark import DTYPES, PAGE_SIZE, Benchmark, Benchmarks
from plugins.low_rank_key_reconstruct import OPERATOR, low_rank_key_reconstruct


def reconstruct(
    sequences: int, keys: int, missed: float, rank: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Benchmark:
    """Sequences of 8192 keys of which `keys` are selected per head, a share of them missed, in chunks of 8;
    the floor is the matrix product of those."""
    chunk_size, chunks = 8, 8192 // 8
    u = torch.randn(sequences * 8192 // PAGE_SIZE, PAGE_SIZE, rank).to(dtype)
    sv = torch.randn(sequences, kv_heads, rank, head_dim).to(dtype)
    lists = torch.randint(0, chunks, (sequences, kv_heads, keys // chunk_size)).int()
    lists[:, :, round(missed * keys / chunk_size) :] = -1
    table = torch.randperm(len(u)).view(sequences, -1).int()
    angle = torch.rand(8192, head_dim // 2)
    args = (u, sv, torch.arange(sequences).int(), lists, table, angle.cos(), angle.sin(), chunk_size)
    runs = {
        "kvforge_ms": lambda: low_rank_key_reconstruct(*args),
        "reference_ms": lambda: OPERATOR.reference(*args),
    }
    flops = 2 * int((lists >= 0).sum()) * chunk_size * rank * head_dim
    case = (
        f"{sequences}x{keys} keys {missed:.0%} missed rank {rank} kv heads {kv_heads} dim {head_dim} {str(dtype)[6:]}"
    )
    return Benchmark(case, runs, flops=flops, dtype=dtype)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in DTYPES:
        for sequences, keys, missed, head_dim in ((1, 2048, 1.0, 128), (8, 2048, 0.4, 128), (8, 256, 0.4, 64)):
            yield "reconstruct", functools.partial(reconstruct, sequences, keys, missed, 160, 8, head_dim, dtype)
