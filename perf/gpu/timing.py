"""How long work takes on a GPU: replays of a CUDA graph of it, timed by events."""

from collections.abc import Callable
from typing import Any

import torch

from perf.harness.rates import best_seconds as best_on_cpu

FLUSH_BYTES = 256 << 20
"""Written before each run, so that nothing of the last one is in the L2 cache."""
NUM_WARM_UPS = 3


def best_seconds(work: Callable[[], Any], device: str, runs: int = 20) -> float:
    """Return the shortest of ``runs`` after three warm-ups. On a GPU the work runs as a CUDA graph, as it does in a
    decode step (starting it from Python takes longer than a small case), the L2 cache flushed before.
    """
    for _ in range(NUM_WARM_UPS):
        work()
    if device == "cpu":
        return best_on_cpu(work, runs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in pairs) / 1e3
