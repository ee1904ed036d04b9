"""Intervals of means over tokens that come in documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A measured value with its 95% interval [``low``, ``high``]."""

    value: float
    low: float
    high: float


def bootstrap_interval(
    sums: Sequence[float], counts: Sequence[float], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Estimate:
    """Return the mean ``sum(sums) / sum(counts)`` of what has ``counts[d]`` values in document d that add up to
    ``sums[d]``, with its 95% percentile interval over resampled documents.

    Whole documents are drawn with replacement (the cluster bootstrap: Davison and Hinkley, Bootstrap Methods and
    their Application, 1997, section 3.8), because values within one are not independent. The same seed gives the same
    documents, so intervals of two measures over the same documents are paired.

    Raises ValueError unless there are at least two documents, each with values.
    """
    if len(sums) != len(counts) or len(sums) < 2 or min(counts) <= 0:
        raise ValueError("an interval over documents needs at least two of them, none empty; give more text")
    num = len(sums)
    draws = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), size=num_resamples)
    values, weights = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    means = (draws @ values) / (draws @ weights)
    low, high = (float(np.quantile(means, level)) for level in (0.025, 0.975))
    return Estimate(float(values.sum() / weights.sum()), low, high)
