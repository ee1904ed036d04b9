"""Benchmarks of scaled_add."""

import torch
from plugins.scaled_add import OPERATOR, scaled_add

from plugins.benchmark import Benchmark, Benchmarks


def add() -> Benchmark:
    """A thousand elements."""
    x = torch.ones(10, 100)
    runs = {"kvforge_ms": lambda: scaled_add(x, x, 0.5), "reference_ms": lambda: OPERATOR.reference(x, x, 0.5)}
    return Benchmark("1000 elements", runs, num_bytes=3 * x.nbytes)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    yield "scaled", add
