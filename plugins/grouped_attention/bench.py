"""Benchmarks of grouped_attention, beside paged_attention over the same tokens in the queries' dtype."""

import functools
import itertools

import torch

from plugins.benchmark import DTYPES, PAGE_SIZE, Benchmark, Benchmarks
from plugins.grouped_attention import OPERATOR, grouped_attention
from plugins.paged_attention import paged_attention
from plugins.seal_pages import seal_pages
from plugins.seal_pages.layout import BITS, sealed_shapes


def attention(
    sequences: int, queries: int, length: int, heads: int, kv_heads: int, head_dim: int, bits: int, dtype: torch.dtype
) -> Benchmark:
    """The floor of a decode step is what it reads: sealed pages, and the exact ones as far as they are filled."""
    width = -(-length // PAGE_SIZE)
    pages, shapes = sequences * width, sealed_shapes(PAGE_SIZE, kv_heads, head_dim, bits)
    exact = [torch.randn(pages, PAGE_SIZE, kv_heads, head_dim).to(dtype) for _ in "kv"]
    sealed = {name: torch.zeros(pages, *shape, dtype=kind) for name, (shape, kind) in shapes.items()}
    exact_table, page_table = (torch.randperm(pages).view(sequences, width).int() for _ in range(2))
    seal_pages(exact[0], exact[1], torch.stack((exact_table, page_table), -1).flatten(0, 1), **sealed)
    q = torch.randn(sequences * queries, heads, head_dim).to(dtype)
    starts = torch.arange(0, sequences * queries + 1, queries).int()
    lengths = torch.full((sequences,), length).int()
    args = (q, *sealed.values(), *exact, starts, lengths, page_table, exact_table, head_dim**-0.5)
    runs = {
        "kvforge_ms": lambda: grouped_attention(*args),
        "attention_ms": lambda: paged_attention(q, exact[0], exact[1], starts, lengths, exact_table, head_dim**-0.5),
        "reference_ms": lambda: OPERATOR.reference(*args),
    }
    kind = "prefill" if queries > 1 else "decode"
    case = f"{kind} {sequences}x{length} heads {heads}/{kv_heads} dim {head_dim} {str(dtype)[6:]} on kivi{bits}"
    if queries > 1:
        flops = 4 * sequences * heads * head_dim * queries * (length - (queries - 1) / 2)
        return Benchmark(case, runs, flops=flops, dtype=dtype)
    own = (length - 1) % PAGE_SIZE + 1
    num_bytes = sum(x[0].nbytes for x in sealed.values()) * (width - 1) + 2 * own * kv_heads * head_dim * dtype.itemsize
    return Benchmark(case, runs, num_bytes=sequences * num_bytes)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, of both formats of sealed pages."""
    for dtype, bits in itertools.product(DTYPES, BITS):
        yield "prefill", functools.partial(attention, 1, 1024, 1024, 16, 4, 64, bits, dtype)
        for shape in ((16, 4, 64), (16, 8, 128)):
            yield "decode", functools.partial(attention, 8, 1, 2048, *shape, bits, dtype)
        yield "decode", functools.partial(attention, 8, 1, 8192, 16, 4, 64, bits, dtype)
        yield "decode", functools.partial(attention, 1, 1, 32768, 32, 8, 128, bits, dtype)
