"""Benchmarks of landmark_select."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from plugins.benchmark import DTYPES, Benchmark, Benchmarks
from plugins.landmark_select import OPERATOR, landmark_select


def select(sequences: int, chunks: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Benchmark:
    """A sixteenth of the chunks is selected; enough layers' landmarks that they come from memory, read once."""
    per_page, selected = 4, chunks // 16
    pages = sequences * -(-chunks // per_page)
    shape = (pages, per_page, kv_heads, head_dim)
    count = max(1, (96 << 20) // (math.prod(shape) * dtype.itemsize))
    landmarks = [torch.randn(shape).to(dtype) for _ in range(count)]
    is_outlier = (torch.rand(shape[:3]) < 48 / chunks).byte()
    q = torch.randn(sequences, heads, head_dim).to(dtype)
    table = torch.randperm(pages).view(sequences, -1).int()
    step = (torch.arange(sequences + 1).int(), table, *(torch.full((sequences,), n).int() for n in (chunks, selected)))
    used = itertools.cycle(landmarks)

    def run(operator: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: operator(q, next(used), is_outlier, *step, head_dim**-0.5, selected)

    runs = {
        "kvforge_ms": run(landmark_select),
        "reference_ms": run(OPERATOR.reference),
    }
    case = f"{sequences}x{chunks} chunks heads {heads}/{kv_heads} dim {head_dim} {str(dtype)[6:]}"
    return Benchmark(case, runs, landmarks[0].nbytes)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for dtype in DTYPES:
        for shape in ((1, 16384, 32, 8, 128), (8, 4096, 32, 8, 128), (8, 256, 16, 4, 64)):
            yield "select", functools.partial(select, *shape, dtype)
