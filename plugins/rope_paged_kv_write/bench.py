"""Benchmarks of rope_paged_kv_write."""

import functools

import torch

from plugins.benchmark import DTYPES, PAGE_SIZE, Benchmark, Benchmarks, bytes_of_head, caches, on_cache
from plugins.rope_paged_kv_write import OPERATOR, rope_paged_kv_write


def write(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: str) -> Benchmark:
    k, v = (torch.randn(tokens, kv_heads, head_dim).to(dtype) for _ in range(2))
    angle = torch.rand(tokens, head_dim // 2)
    shape = (tokens // PAGE_SIZE + 1, PAGE_SIZE, kv_heads, head_dim)
    (k_pool, k_scales), (v_pool, v_scales) = caches((torch.zeros(shape).to(dtype) for _ in "kv"), kv_dtype)
    args = (k, v, angle.cos(), angle.sin(), torch.randperm(tokens).int(), k_pool, v_pool, k_scales, v_scales)
    runs = {
        "kvforge_ms": lambda: rope_paged_kv_write(*args),
        "reference_ms": lambda: OPERATOR.reference(*args),
    }
    stored = tokens * kv_heads * bytes_of_head(k_pool, v_pool, k_scales, v_scales)
    num_bytes = 2 * k.nbytes + stored + 2 * angle.nbytes
    case = f"{tokens} tokens kv heads {kv_heads} dim {head_dim} {str(dtype)[6:]}{on_cache(kv_dtype)}"
    return Benchmark(case, runs, num_bytes)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in DTYPES:
        for kv_dtype in kv_dtypes:
            yield "write", functools.partial(write, 2048, 8, 128, dtype, kv_dtype)
