"""Benchmarks of gated_delta_rule."""

import functools

import torch

from plugins.benchmark import Benchmark, Benchmarks
from plugins.gated_delta_rule import gated_delta_rule

KEY_HEADS, HEADS, DIM = 16, 32, 128


def delta(tokens: int, has_queries: bool) -> Benchmark:
    """The floor: four multiply-adds of each number of a state for each token, or three, or the states moved once."""
    qkv = torch.randn(tokens, (1 + has_queries) * KEY_HEADS * DIM + HEADS * DIM).bfloat16()
    pool, row, write = torch.randn(1, HEADS, DIM, DIM), torch.zeros(1).int(), torch.full((tokens,), -1).int()
    write[-1] = 0
    gates, decay_log, starts = torch.randn(tokens, 2 * HEADS), torch.full((HEADS,), -3.0), torch.tensor([0, tokens])
    args = qkv, gates, decay_log, torch.ones(HEADS), starts.int(), row, write, pool, has_queries
    case = f"{tokens} tokens, {HEADS} states {DIM}x{DIM}{'' if has_queries else ' without queries'} bfloat16"
    flops = (8 if has_queries else 6) * tokens * pool.numel()
    return Benchmark(case, {"kvforge_ms": lambda: gated_delta_rule(*args)}, 2 * pool.nbytes, flops, torch.float32)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases: Qwen3-Next-80B-A3B, below a cut and above it, and a decode step."""
    for tokens, has_queries in ((512, True), (512, False), (1, True)):
        yield "delta", functools.partial(delta, tokens, has_queries)
