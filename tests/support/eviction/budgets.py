"""How many tokens each head keeps, for the rules whose heads share a budget.

A function gets the lanes of every owner, their rankings, the mean budget and the moment, and returns ``Budgets`` of
each owner.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.eviction.entries import Lane, Moment
from tests.support.eviction.rules import Ranking


@dataclass(frozen=True)
class Budgets:
    """Tokens of each head of an owner, and the smallest difference of scores that decided it."""

    tokens: list[int]
    slack: float = math.inf


def adakv(owners: list[list[Lane]], rankings: list[list[Ranking]], keep: int, now: Moment) -> list[Budgets]:
    """AdaKV (arXiv 2407.11550, algorithm 1): the best of all heads' tokens together, a floor of each head's own first.

    Then whole pages: those that a head fills, within the bounds, and one more or less where most is missing or over.
    """
    return [_adakv(lanes, ranked, keep, now) for lanes, ranked in zip(owners, rankings, strict=True)]


def _adakv(lanes: list[Lane], rankings: list[Ranking], keep: int, now: Moment) -> Budgets:
    """AdaKV (arXiv 2407.11550, algorithm 1): the best of all heads' tokens together, a floor of each head's own first.

    Then whole pages: those that a head fills, within the bounds, and one more or less where most is missing or over.
    """
    num_heads, page = len(lanes), now.page_size
    floor = max(keep * now.parameters.get("floor_percent", 20) // 100, sum(rankings[0].protected), 1)
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
    lowest, total = math.ceil(floor / page), num_heads * keep // page
    highest = min(total - (num_heads - 1) * lowest, len(lanes[0]) // page)
    return Budgets(_in_pages(wanted, total, page, lowest, highest), slack)


def pyramid(owners: list[list[Lane]], rankings: list[list[Ranking]], keep: int, now: Moment) -> list[Budgets]:
    """PyramidKV (arXiv 2406.02069, section 4.2): an arithmetic sequence over the owners with the mean ``keep``, whose
    last term is ``keep / beta`` unless that is less than what is protected, or the first then more than there are.

    In whole pages, as adakv's.
    """
    page, count, length = now.page_size, len(owners), len(owners[0][0])
    fewest = max(sum(rankings[0][0].protected), 1)
    last = max(keep / now.parameters.get("beta", 20), fewest)
    first = 2 * keep - last
    if first > length:
        first, last = length, 2 * keep - length
    line = [first + (last - first) * i / (count - 1) for i in range(count)] if count > 1 else [keep]
    pages = _in_pages(line, count * keep // page, page, math.ceil(fewest / page), length // page)
    return [Budgets([tokens] * len(lanes)) for tokens, lanes in zip(pages, owners, strict=True)]


def simlayer(owners: list[list[Lane]], rankings: list[list[Ranking]], keep: int, now: Moment) -> list[Budgets]:
    """SimLayerKV (arXiv 2410.13846, section 3.2): by the share of the last token's attention that goes to the first
    tokens and the newest. The least lazy keep all they may, the laziest those tokens; in whole pages."""
    sinks, page = now.parameters.get("sinks", 4), now.page_size
    recent = now.parameters.get("recent", max(keep // 4 - sinks, 1))
    most = min(len(owners[0][0]), max(keep * now.parameters.get("ceiling_percent", 400) // 100, keep)) // page * page
    least = min(math.ceil((sinks + recent) / page) * page, most)

    def share(lanes: list[Lane]) -> float:
        given = [
            (e, sum(look.weight for look in e.looks if look.query == now.computed - 1)) for la in lanes for e in la
        ]
        own = [weight for e, weight in given if e.position < sinks or e.position >= now.computed - recent]
        return sum(own) / sum(weight for _, weight in given)

    order = sorted(range(len(owners)), key=lambda i: share(owners[i]))
    tokens, left = [least] * len(owners), len(owners) * (keep - least)
    for i in order:
        tokens[i] += min(most - least, left)
        left -= tokens[i] - least
    differences = [share(owners[b]) - share(owners[a]) for a, b in itertools.pairwise(order) if tokens[a] != tokens[b]]
    return [
        Budgets([n] * len(lanes), min(differences, default=math.inf)) for n, lanes in zip(tokens, owners, strict=True)
    ]


def squeeze(owners: list[list[Lane]], rankings: list[list[Ranking]], keep: int, now: Moment) -> list[Budgets]:
    """SqueezeAttention (arXiv 2404.04793, algorithm 1): of three groups of owners by their mean cosine over the last
    prompt tokens, the most similar keep a share of the budget, the others what is left. In whole pages."""
    page, count, length = now.page_size, len(owners), len(owners[0][0])
    first = now.num_prompt - now.parameters.get("similar", 32)
    means = [statistics.fmean(c for p, c in of_owner.items() if p >= first) for of_owner in now.cosines.values()]
    ordered = sorted(range(count), key=lambda i: means[i])
    splits = [
        (sum(_squares([means[i] for i in part]) for part in (ordered[:a], ordered[a:b], ordered[b:])), ordered[b:])
        for a in range(1, count - 1)
        for b in range(a + 1, count)
    ]
    best, top = min(splits, default=(0.0, []))
    slack = min((cost - best for cost, members in splits if members != top), default=math.inf)
    fewest = max(sum(rankings[0][0].protected), 1)
    share = max(keep * now.parameters.get("share_percent", 35) / 100, sum(rankings[0][0].protected))
    rest = (count * keep - len(top) * share) / (count - len(top))
    ceiling = keep * now.parameters.get("ceiling_percent", 400) // 100 // page
    wanted = [share if i in top else rest for i in range(count)]
    pages = _in_pages(wanted, count * keep // page, page, math.ceil(fewest / page), min(ceiling, length // page))
    return [Budgets([tokens] * len(lanes), slack) for tokens, lanes in zip(pages, owners, strict=True)]


def _squares(values: list[float]) -> float:
    mean = statistics.fmean(values)
    return sum((x - mean) ** 2 for x in values)


def _in_pages(wanted: Sequence[float], total: int, page: int, lowest: int, highest: int) -> list[int]:
    """Return tokens in whole pages, ``total`` pages together."""
    given = [sorted((lowest, int(tokens // page), highest))[1] for tokens in wanted]
    while sum(given) < total:
        missing = {h: wanted[h] - given[h] * page for h in range(len(wanted)) if given[h] < highest}
        given[max(missing, key=lambda h: (missing[h], -h))] += 1
    while sum(given) > total:
        over = {h: given[h] * page - wanted[h] for h in range(len(wanted)) if given[h] > lowest}
        given[max(over, key=lambda h: (over[h], -h))] -= 1
    return [pages * page for pages in given]


Owners = list[list[Lane]]
BUDGETS: dict[str, Callable[[Owners, list[list[Ranking]], int, Moment], list[Budgets]]] = {
    "adakv": adakv,
    "pyramid": pyramid,
    "simlayer": simlayer,
    "squeeze": squeeze,
    "keydiff+adakv": adakv,
    "h2o+pyramid": pyramid,
    "keydiff+squeeze": squeeze,
}
