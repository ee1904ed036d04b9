"""Which entries of a lane stay, and how near another choice was."""

import bisect
import math

from tests.support.eviction.entries import Lane, LaneChoice
from tests.support.eviction.rules import Ranking


def choose(lane: Lane, ranking: Ranking, keep: int, slack: float = math.inf) -> LaneChoice:
    """Return the ``keep`` entries which stay: the protected, larger scores, newer positions. ``slack`` is the smallest
    difference that decided ``keep``."""
    protected, scores = ranking.protected, ranking.scores
    order = sorted(range(len(lane)), key=lambda i: (protected[i], scores[i], lane[i].position), reverse=True)
    worst = order[keep - 1]
    best = order[min(keep, len(order) - 1)]
    if keep == len(order) or protected[worst] != protected[best]:
        margin = math.inf
    elif ranking.leanings is None:
        margin = scores[worst] - scores[best]
    else:
        compared = [i for i in order[:keep] if protected[i] == protected[worst]]
        margin = _margin_of_counts(lane, ranking, compared, order[keep:])
    kept = tuple(sorted(lane[i].position for i in order[:keep]))
    return LaneChoice(kept, min(margin, ranking.slack, slack), scores[worst], ranking.unit)


def _margin_of_counts(lane: Lane, ranking: Ranking, kept: list[int], evicted: list[int]) -> float:
    """Return the smallest x such that another choice is possible where every query that is within x of the other side
    may count otherwise."""
    leanings, scores = ranking.leanings or [], ranking.scores

    def another_is_possible(x: float) -> bool:
        worst = min((scores[i] - sum(0 <= lean <= x for lean in leanings[i]), lane[i].position) for i in kept)
        best = max((scores[i] + sum(-x <= lean < 0 for lean in leanings[i]), lane[i].position) for i in evicted)
        return worst < best

    distances = sorted(abs(lean) for i in (*kept, *evicted) for lean in leanings[i])
    first = bisect.bisect_left(distances, True, key=another_is_possible)
    return distances[first] if first < len(distances) else math.inf
