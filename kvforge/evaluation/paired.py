"""Comparing two systems on the same prompts: the difference of their accuracies, and whether it is chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt


@dataclass(frozen=True)
class PairedDifference:
    """``gained`` prompts only the second system has right, ``lost`` only the first; ``difference`` = (gained - lost)
    / n with its 95% interval [``low``, ``high``], all in -1..1; ``p_value`` of the exact McNemar test."""

    num_prompts: int
    gained: int
    lost: int
    difference: float
    low: float
    high: float
    p_value: float


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> PairedDifference:
    """Compare prompt by prompt.

    The interval is Wald's with half a count added to each of the four cells of the table (Agresti and Min, Statistics
    in Medicine 24, 2005), which holds its level for few discordant pairs. The test is the exact two-sided binomial
    one on the discordant pairs (McNemar, Psychometrika 12, 1947).

    Raises ValueError for unequal lengths or no prompts.
    """
    if len(first) != len(second) or not first:
        raise ValueError("both systems must have answered the same prompts, at least one")
    n = len(first)
    gained = sum(b and not a for a, b in zip(first, second, strict=True))
    lost = sum(a and not b for a, b in zip(first, second, strict=True))
    more, total = gained - lost, gained + lost + 1.0
    middle = more / (n + 2)
    half = 1.959964 * sqrt(max(total - more * more / (n + 2), 0.0)) / (n + 2)
    discordant = gained + lost
    tail = sum(comb(discordant, k) for k in range(min(gained, lost) + 1)) / 2**discordant
    low, high = max(middle - half, -1.0), min(middle + half, 1.0)
    return PairedDifference(n, gained, lost, more / n, low, high, min(1.0, 2 * tail))
