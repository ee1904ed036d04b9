"""Distributions of what is observed one by one, in buckets whose bounds never change."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class Histogram:
    """Counts observations in buckets. Bucket i holds those at most ``bounds[i]`` and above ``bounds[i - 1]``; one more
    bucket at the end holds the rest. Observing costs one binary search."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, so many times over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.count += times

    def to_json(self) -> dict[str, Any]:
        """Return ``bounds``, ``counts`` (each bucket alone, one more than bounds), ``sum`` and ``count``."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum, "count": self.count}


def decades(first: int, last: int) -> tuple[float, ...]:
    """Return 1, 2 and 5 times every power of ten from 10**first to 10**last, each the nearest float."""
    return tuple(float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 2, 5))
