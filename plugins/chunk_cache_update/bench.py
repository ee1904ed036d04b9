"""Benchmarks of chunk_cache_update."""

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from plugins.benchmark import Benchmark, Benchmarks
from plugins.chunk_cache_update import OPERATOR, chunk_cache_update

SHAPES = ((8, 256, 0.4, 8, 128), (8, 32, 0.4, 4, 64))
"""Sequences, places, share of missed chunks, KV heads, head dim."""


def selections(
    sequences: int, places: int, missed: float, kv_heads: int
) -> tuple[Iterator[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Two selections in turn, a share of each not in the other; and an empty cache, its counts and slots."""
    one = torch.arange(places).expand(sequences, kv_heads, places)
    moved = torch.rand(one.shape) < missed
    cached, counts = torch.full(one.shape, -1).int(), torch.zeros(sequences, kv_heads, 2, dtype=torch.int64)
    in_turn = itertools.cycle([one.int(), (one + places * moved).sort().values.int()])
    return in_turn, (cached, counts, torch.arange(sequences).int())


def update(sequences: int, places: int, missed: float, kv_heads: int) -> Benchmark:
    """The floor is the lists."""
    in_turn, state = selections(sequences, places, missed, kv_heads)
    runs = {
        "kvforge_ms": lambda: chunk_cache_update(next(in_turn), *state),
        "reference_ms": lambda: OPERATOR.reference(next(in_turn), *state),
    }
    case = f"{sequences}x{places} places {missed:.0%} missed kv heads {kv_heads}"
    return Benchmark(case, runs, num_bytes=4 * state[0].nbytes)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases, caches in these formats among them."""
    for sequences, places, missed, kv_heads, _ in SHAPES:
        yield "chunks", functools.partial(update, sequences, places, missed, kv_heads)
