"""Benchmarks of mamba2_scan."""

import functools

import torch

from plugins.benchmark import Benchmark, Benchmarks
from plugins.mamba2_scan import mamba2_scan

HEADS, HEAD_DIM, STATE_DIM = 48, 32, 128


def scan(sequences: int, tokens: int) -> Benchmark:
    """The floor: three multiply-adds of each number of a state for each token, or the states read and written once."""
    total = sequences * tokens
    xbc = torch.randn(total, HEADS * HEAD_DIM + 2 * STATE_DIM).bfloat16()
    pool, rows = torch.randn(sequences, HEADS, STATE_DIM, HEAD_DIM), torch.arange(sequences).int()
    write = torch.full((total,), -1).int()
    write[tokens - 1 :: tokens] = rows
    decay_log, ones = torch.full((HEADS,), -3.0), torch.ones(HEADS)
    starts = torch.arange(sequences + 1).int() * tokens
    args = xbc, torch.randn(total, HEADS), decay_log, ones, ones, starts, rows, write, pool
    flops = 6 * total * HEADS * STATE_DIM * HEAD_DIM
    case = f"{sequences}x{tokens} tokens, {HEADS} states {STATE_DIM}x{HEAD_DIM} bfloat16"
    return Benchmark(case, {"kvforge_ms": lambda: mamba2_scan(*args)}, 2 * pool.nbytes, flops, torch.float32)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases: Granite-4.0-H-350M, chunks of a prompt and decode steps."""
    for sequences, tokens in ((1, 512), (1, 2048), (1, 1), (8, 1)):
        yield "scan", functools.partial(scan, sequences, tokens)
