"""Rounds in which several take turns, and what is in the middle of them."""

import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from perf.harness.tables import Row

Item = TypeVar("Item")


def turned(items: Sequence[Item], index: int) -> list[Item]:
    """Return the items in their order, from round to round with another one first."""
    first = index % len(items)
    return [*items[first:], *items[:first]]


def medians(runs: Sequence[Row]) -> dict[str, Any]:
    """Return the median of each number that the runs have."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """Return the median with a 95% interval by bootstrap."""
    found = np.array(values)
    picked = np.random.default_rng(0).integers(len(found), size=(2000, len(found)))
    low, high = np.quantile(np.median(found[picked], axis=1), (0.025, 0.975))
    return {"value": float(np.median(found)), "low": float(low), "high": float(high)}
