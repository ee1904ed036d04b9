"""Benchmarks of attention_mass."""

import functools

import torch

from plugins.attention_mass import OPERATOR, attention_mass
from plugins.attention_mass.reference import SUM
from plugins.benchmark import DTYPES, PAGE_SIZE, Benchmark, Benchmarks, caches, on_cache
from plugins.paged_attention import paged_attention


def observe(
    sequences: int,
    queries: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: str,
) -> Benchmark:
    """Beside it the attention of the same queries, which the weights are those of. The floor is the products of queries
    and keys or, if longer, the bytes: keys once, statistics read and written."""
    width = -(-length // PAGE_SIZE)
    shape = (sequences * width, PAGE_SIZE, kv_heads, head_dim)
    (k_pool, k_scales), (v_pool, v_scales) = caches((torch.randn(shape).to(dtype) for _ in "kv"), kv_dtype)
    page_table, state_table = (torch.randperm(sequences * width).view(sequences, width).int() for _ in range(2))
    q = torch.randn(sequences * queries, heads, head_dim).to(dtype)
    query_start = torch.arange(0, sequences * queries + 1, queries).int()
    lengths, none = torch.full((sequences,), length).int(), torch.zeros(sequences).int()
    mass = torch.zeros(shape[:3])
    scale = head_dim**-0.5
    step = (query_start, lengths, page_table)
    args = (q, k_pool, *step, state_table, none, lengths, scale, SUM, mass, None, k_scales)
    reference = OPERATOR.reference
    runs = {
        "kvforge_ms": lambda: attention_mass(*args),
        "attention_ms": lambda: paged_attention(q, k_pool, v_pool, *step, scale, 0, k_scales, v_scales),
        "reference_ms": lambda: reference(*args),
    }
    kind = "prefill" if queries > 1 else "decode"
    of = f"{sequences}x{queries} over {length}" if queries > 1 else f"{sequences}x{length}"
    bytes_per_head = head_dim * k_pool.dtype.itemsize + (0 if k_scales is None else 4) + 8
    return Benchmark(
        f"{kind} {of} heads {heads}/{kv_heads} dim {head_dim} {str(dtype)[6:]}{on_cache(kv_dtype)}",
        runs,
        num_bytes=sequences * length * kv_heads * bytes_per_head,
        flops=2 * sequences * heads * head_dim * queries * (length - (queries - 1) / 2),
        dtype=dtype,
    )


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in DTYPES:
        for queries, length in ((512, 1024), (64, 2048)):
            yield "observe", functools.partial(observe, 1, queries, length, 16, 4, 64, dtype, "same")
        for kv_dtype in kv_dtypes:
            for sequences in (8, 24):
                yield "observe", functools.partial(observe, sequences, 1, 512, 16, 4, 64, dtype, kv_dtype)
