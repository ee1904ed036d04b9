"""Benchmarks of seal_pages."""

import functools
import itertools

import torch

from plugins.benchmark import DTYPES, PAGE_SIZE, Benchmark, Benchmarks
from plugins.seal_pages import seal_pages
from plugins.seal_pages.layout import BITS, sealed_shapes


def seal(pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, bits: int) -> Benchmark:
    """The floor is exact pages read and sealed ones written."""
    exact = [torch.randn(pages, PAGE_SIZE, kv_heads, head_dim).to(dtype) for _ in "kv"]
    shapes = sealed_shapes(PAGE_SIZE, kv_heads, head_dim, bits)
    sealed = {name: torch.zeros(pages, *shape, dtype=kind) for name, (shape, kind) in shapes.items()}
    pairs = torch.stack((torch.randperm(pages), torch.randperm(pages)), -1).int()
    return Benchmark(
        f"{pages * PAGE_SIZE} tokens kv heads {kv_heads} dim {head_dim} {str(dtype)[6:]} to {bits} bits",
        {"kvforge_ms": lambda: seal_pages(exact[0], exact[1], pairs, **sealed)},
        num_bytes=sum(x.nbytes for x in (*exact, *sealed.values())),
    )


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, of both formats of sealed pages."""
    for dtype, bits in itertools.product(DTYPES, BITS):
        for shape in ((4, 64), (8, 128)):
            yield "seal", functools.partial(seal, 64, *shape, dtype, bits)
