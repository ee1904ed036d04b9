"""Benchmarks of packed_linear."""

import functools
import itertools

import torch
import torch.nn.functional as F

from plugins.benchmark import Benchmark, Benchmarks
from plugins.packed_linear import pack, packed_linear
from plugins.packed_linear.packing import IN_STEPS


def linear(tokens: int, outputs: int, depth: int, dtype: torch.dtype) -> Benchmark:
    """Beside torch's linear layer in bfloat16; enough weights that they come from memory. The floor is the greater of
    their bytes and, with bfloat16 weights, the matrix product."""
    count = max(1, (96 << 20) // (outputs * depth * 2))
    weights = [torch.randn(outputs, depth).bfloat16() for _ in range(count)]
    packed = [pack(weight, dtype) for weight in weights]
    x = torch.randn(tokens, depth).bfloat16()
    used = itertools.cycle(range(count))

    def ours() -> torch.Tensor:
        weight, scales = packed[next(used)]
        return packed_linear(x, weight, outputs, scales=scales)

    runs = {
        "kvforge_ms": ours,
        "linear_ms": lambda: F.linear(x, weights[next(used)]),
    }
    flops = 2 * tokens * outputs * depth if dtype == torch.bfloat16 else 0
    name = str(dtype)[6:].removeprefix("u")
    return Benchmark(f"{tokens} tokens {outputs}x{depth} {name} weights", runs, packed[0][0].nbytes, flops)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in (torch.bfloat16, torch.int8, IN_STEPS):
        for tokens in (1, 8, 2048):
            for outputs, depth in ((1536, 1024), (5632, 1024), (1024, 2816)):
                yield "linear", functools.partial(linear, tokens, outputs, depth, dtype)
