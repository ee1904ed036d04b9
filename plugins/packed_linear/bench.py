"""Benchmarks of packed_linear."""

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F

from plugins.benchmark import Benchmark, Benchmarks
from plugins.packed_linear import pack, packed_linear
from plugins.packed_linear.packing import IN_STEPS


def linear(tokens: int, outputs: int, depth: int, dtype: torch.dtype, is_normed: bool = False) -> Benchmark:
    """Beside torch's linear layer in bfloat16; enough weights that they come from memory. The floor is the greater of
    their bytes and, with bfloat16 weights, the matrix product. ``is_normed``: what engines have behind a norm, rows
    normed and, with int8 and int4 weights, rotated."""
    count = max(1, (96 << 20) // (outputs * depth * 2))
    weights = [torch.randn(outputs, depth).bfloat16() for _ in range(count)]
    packed = [pack(weight, dtype) for weight in weights]
    x = torch.randn(tokens, depth).bfloat16()
    used = itertools.cycle(range(count))
    before: dict[str, Any] = {}
    if is_normed:
        before = {"norm": torch.ones(depth).bfloat16(), "eps": 1e-5, "rotated": dtype != torch.bfloat16}

    def ours() -> torch.Tensor:
        weight, scales = packed[next(used)]
        return packed_linear(x, weight, outputs, scales=scales, **before)

    runs = {
        "kvforge_ms": ours,
        "linear_ms": lambda: F.linear(x, weights[next(used)]),
    }
    flops = 2 * tokens * outputs * depth if dtype == torch.bfloat16 else 0
    name = str(dtype)[6:].removeprefix("u")
    rows = "normed tokens" if is_normed else "tokens"
    return Benchmark(f"{tokens} {rows} {outputs}x{depth} {name} weights", runs, packed[0][0].nbytes, flops)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in (torch.bfloat16, torch.int8, IN_STEPS):
        for tokens in (1, 8, 2048):
            for outputs, depth in ((1536, 1024), (5632, 1024), (1024, 2816)):
                yield "linear", functools.partial(linear, tokens, outputs, depth, dtype)
        for outputs, depth in ((960, 576), (3072, 576), (1536, 1024), (6144, 4096)):
            yield "normed", functools.partial(linear, 2048, outputs, depth, dtype, is_normed=True)
