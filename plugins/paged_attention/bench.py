"""Benchmarks of paged_attention."""

import functools

import torch
import torch.nn.functional as F

from plugins.benchmark import DTYPES, PAGE_SIZE, Benchmark, Benchmarks, bytes_of_head, caches, on_cache
from plugins.paged_attention import OPERATOR, paged_attention


def attention(
    sequences: int,
    queries: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: str,
) -> Benchmark:
    width = -(-length // PAGE_SIZE)
    shape = (sequences * width, PAGE_SIZE, kv_heads, head_dim)
    values = [torch.randn(shape).to(dtype) for _ in range(2)]
    (k_pool, k_scales), (v_pool, v_scales) = caches(values, kv_dtype)
    page_table = torch.randperm(sequences * width).view(sequences, width).int()
    q = torch.randn(sequences * queries, heads, head_dim).to(dtype)
    query_start = torch.arange(0, sequences * queries + 1, queries).int()
    step = (query_start, torch.full((sequences,), length).int(), page_table)
    args = (q, k_pool, v_pool, *step, head_dim**-0.5, 0, k_scales, v_scales)

    def dense(x: torch.Tensor) -> torch.Tensor:
        return x[page_table.long()].view(sequences, -1, kv_heads, head_dim)[:, :length].transpose(1, 2).contiguous()

    k, v = (dense(x) for x in values)
    dense_q = q.view(sequences, queries, heads, head_dim).transpose(1, 2)
    causal = queries > 1
    reference = OPERATOR.reference
    runs = {
        "kvforge_ms": lambda: paged_attention(*args),
        "sdpa_ms": lambda: F.scaled_dot_product_attention(dense_q, k, v, is_causal=causal, enable_gqa=True),
        "reference_ms": lambda: reference(*args),
    }
    kind = "prefill" if causal else "decode"
    case = f"{kind} {sequences}x{length} heads {heads}/{kv_heads} dim {head_dim} {str(dtype)[6:]}{on_cache(kv_dtype)}"
    if causal:
        flops = 4 * sequences * heads * head_dim * queries * (length - (queries - 1) / 2)
        return Benchmark(case, runs, flops=flops, dtype=dtype)
    num_bytes = sequences * length * kv_heads * bytes_of_head(k_pool, v_pool, k_scales, v_scales)
    return Benchmark(case, runs, num_bytes=num_bytes)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in DTYPES:
        for shape in ((16, 16, 64), (16, 4, 64), (16, 8, 128)):
            yield "prefill", functools.partial(attention, 1, 2048, 2048, *shape, dtype, "same")
        for kv_dtype in kv_dtypes:
            for shape in ((16, 4, 64), (16, 8, 128), (16, 2, 128)):
                yield "decode", functools.partial(attention, 8, 1, 2048, *shape, dtype, kv_dtype)
            yield "decode", functools.partial(attention, 1, 1, 32768, 32, 8, 128, dtype, kv_dtype)
