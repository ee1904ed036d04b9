"""How many tokens each head of an owner keeps, for the rules whose heads share a budget."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.eviction.entries import Lane, Moment
from tests.support.eviction.rules import Ranking


@dataclass(frozen=True)
class Budgets:
    """Tokens of each head, and the smallest difference of scores that decided it."""

    tokens: list[int]
    slack: float = math.inf


def adakv(lanes: list[Lane], rankings: list[Ranking], keep: int, now: Moment) -> Budgets:
    """AdaKV (arXiv 2407.11550, algorithm 1): the best of all heads' tokens together, a floor of each head's own first.

    Then whole pages: those that a head fills, within the bounds, and one more or less where most is missing or over.
    """
    num_heads, page, window = len(lanes), now.page_size, now.parameters.get("window", 32)
    floor = max(keep * now.parameters.get("floor_percent", 20) // 100, window)
    pooled = []
    for head, (lane, ranking) in enumerate(zip(lanes, rankings, strict=True)):
        best = sorted(
            range(len(lane)), key=lambda i: (ranking.protected[i], ranking.scores[i], lane[i].position), reverse=True
        )
        pooled += [
            (not ranking.protected[i], -ranking.scores[i], rank, head) for rank, i in enumerate(best) if rank >= floor
        ]
    pooled.sort()
    count = num_heads * (keep - floor)
    wanted = [floor + sum(head == one for *_, one in pooled[:count]) for head in range(num_heads)]
    slack = math.inf
    if 0 < count < len(pooled) and pooled[count - 1][0] == pooled[count][0]:
        slack = pooled[count][1] - pooled[count - 1][1]
    return Budgets(_in_pages(wanted, keep, page, floor, min(len(lane) for lane in lanes)), slack)


def _in_pages(wanted: list[int], keep: int, page: int, floor: int, length: int) -> list[int]:
    lowest, total = math.ceil(floor / page), len(wanted) * keep // page
    highest = min(total - (len(wanted) - 1) * lowest, length // page)
    given = [sorted((lowest, tokens // page, highest))[1] for tokens in wanted]
    while sum(given) < total:
        missing = {h: wanted[h] - given[h] * page for h in range(len(wanted)) if given[h] < highest}
        given[max(missing, key=lambda h: (missing[h], -h))] += 1
    while sum(given) > total:
        over = {h: given[h] * page - wanted[h] for h in range(len(wanted)) if given[h] > lowest}
        given[max(over, key=lambda h: (over[h], -h))] -= 1
    return [pages * page for pages in given]


BUDGETS: dict[str, Callable[[list[Lane], list[Ranking], int, Moment], Budgets]] = {"adakv": adakv}
