"""What a machine reaches, on all of torch's threads."""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor


def gemm_rate(
    product: Callable[[Tensor, Tensor], Any], pair: Callable[[int], Tensor], size: int, runs: int, least: float = 0.0
) -> float:
    """FLOP/s of the product of a pair of matrices of ``size``, or of small ones where these do not reach ``least``.

    The small ones run twice: torch prepares some products when it first makes one.
    """
    small = size // 4
    for n in (small, size):
        a, b = pair(n)
        rate = 2 * n**3 / best_seconds(lambda a=a, b=b: product(a, b), runs if n == size else 2)
        if rate < least:
            break
    return rate


def best_seconds(work: Callable[[], Any], runs: int) -> float:
    """The least of so many runs."""
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
