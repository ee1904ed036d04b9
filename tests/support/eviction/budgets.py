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


def kvzip(owners: list[list[Lane]], rankings: list[list[Ranking]], keep: int, now: Moment) -> list[Budgets]:
    """KVzip (arXiv 2505.23416, section 3.3): the best of all tokens of all heads and owners; in whole pages, as
    adakv's, and up to the ceiling."""
    lanes = [lane for of_owner in owners for lane in of_owner]
    ceiling = keep * now.parameters.get("ceiling_percent", 400) // 100
    together = _adakv(
        lanes, [ranking for ranked in rankings for ranking in ranked], keep, now, floor=0, ceiling=ceiling
    )
    tokens = iter(together.tokens)
    return [Budgets([next(tokens) for _ in of_owner], together.slack) for of_owner in owners]


def kvzap(owners: list[list[Lane]], rankings: list[list[Ranking]], keep: int, now: Moment) -> list[Budgets]:
    """KVzap (arXiv 2601.07891, section 3.3): the tokens above the threshold and the protected, up to the best ``keep``
    of a head on average and the ceiling, in pages that are filled up with the next best. Of a prompt that did not fill
    its last page, as many of the newest tokens are in no page that counts, and stay."""
    page, behind = now.page_size, now.num_prompt % now.page_size
    threshold = -now.parameters.get("threshold", 400) / 100 if now.parameters.get("threshold", 400) else -math.inf
    lanes = [lane[: len(lane) - behind] for of_owner in owners for lane in of_owner]
    scored = [
        sorted(((p, s, e.position) for p, s, e in zip(r.protected, r.scores, lane, strict=False)), reverse=True)
        for r, lane in zip((r for of_owner in rankings for r in of_owner), lanes, strict=True)
    ]
    floor = max(sum(protected for protected, *_ in of_lane) for of_lane in scored)
    pooled = sorted(
        (-s, rank, head) for head, of_lane in enumerate(scored) for rank, (p, s, _) in enumerate(of_lane) if not p
    )
    count = len(lanes) * (keep - floor)
    slack = pooled[count][0] - pooled[count - 1][0] if 0 < count < len(pooled) else math.inf
    slack = min([slack, *(abs(-s - threshold) for s, *_ in pooled)])
    ceiling = max(keep * now.parameters.get("ceiling_percent", 400) // 100, keep)
    highest = [min(ceiling, len(lane)) // page for lane in lanes]
    wanted = [
        min(
            floor + sum(head == one for *_, one in pooled[:count]),
            sum(p or s >= threshold for p, s, _ in of_lane),
            highest[head] * page,
        )
        for head, of_lane in enumerate(scored)
    ]
    total = sum(math.ceil(tokens / page) for tokens in wanted) if threshold > -math.inf else sum(highest)
    total = min(total, len(lanes) * keep // page)
    pages = _in_pages(wanted, total, page, math.ceil(floor / page), highest)
    tokens = iter(n + behind for n in pages)
    return [Budgets([next(tokens) for _ in of_owner], slack) for of_owner in owners]


def _adakv(
    lanes: list[Lane],
    rankings: list[Ranking],
    keep: int,
    now: Moment,
    floor: int | None = None,
    ceiling: int | None = None,
) -> Budgets:
    """AdaKV (arXiv 2407.11550, algorithm 1): the best of all heads' tokens together, a floor of each head's own first.

    Then whole pages: those that a head fills, within the bounds, and one more or less where most is missing or over.
    """
    num_heads, page = len(lanes), now.page_size
    floor = keep * now.parameters.get("floor_percent", 20) // 100 if floor is None else floor
    floor = max(floor, sum(rankings[0].protected), 1)
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
    highest = highest if ceiling is None else min(ceiling, len(lanes[0])) // page
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


def fastgen(owners: list[list[Lane]], rankings: list[list[Ranking]], keep: int, now: Moment) -> list[Budgets]:
    """FastGen (arXiv 2310.01801, section 3.3): the cheapest of five nested sets of tokens that recovers enough of a
    head's attention. While all take more than ``keep`` on average, the head whose next smaller set recovers most takes
    that; then the head with the least gets a page, or that which is left with the most loses one. Sets and pages fill
    up by rank."""
    page, enough = now.page_size, now.parameters.get("recover_percent", 95) / 100
    ceiling = max(keep * now.parameters.get("ceiling_percent", 400) // 100, keep)
    most = min(len(owners[0][0]), ceiling) // page
    ranked = [ranking for of_owner in rankings for ranking in of_owner]
    every = [lane for of_owner in owners for lane in of_owner]
    given = [_ranked_weights(lane, ranking) for lane, ranking in zip(every, ranked, strict=True)]
    sizes = [[sum(tier >= least for tier in ranking.protected) for least in (4, 3, 2, 1)] for ranking in ranked]

    def recovered(lane: int, tokens: int) -> float:
        return sum(given[lane][:tokens]) / sum(given[lane])

    def pages_of(lane: int, choice: int) -> int:
        return most if choice == 4 else min(max(math.ceil(sizes[lane][choice] / page), 1), most)

    differences = [math.inf]
    choices = []
    for lane, of_lane in enumerate(sizes):
        shares = [recovered(lane, size) for size in of_lane]
        choices.append(next((i for i, share in enumerate(shares) if share >= enough), 4))
        differences += [abs(share - enough) for share in shares]
    total = sum(map(len, owners)) * keep // page
    while sum(map(pages_of, range(len(choices)), choices)) > total and any(choices):
        could = sorted(((recovered(i, sizes[i][c - 1]), i) for i, c in enumerate(choices) if c), reverse=True)
        differences += [a - b for (a, _), (b, _) in itertools.pairwise(could[:2])]
        choices[could[0][1]] -= 1
    pages = [pages_of(lane, choice) for lane, choice in enumerate(choices)]
    while (missing := total - sum(pages)) != 0:
        step = 1 if missing > 0 else -1
        could = sorted(
            (step * recovered(i, (n if step > 0 else n - 1) * page), i)
            for i, n in enumerate(pages)
            if 1 <= n + step <= most
        )
        if abs(missing) == 1:  # those before may come in any order
            differences += [b - a for (a, _), (b, _) in itertools.pairwise(could[:2])]
        pages[could[0][1]] += step
    tokens = iter(n * page for n in pages)
    slack = 0.0 if min(differences) <= NEAR_SHARE else math.inf
    return [Budgets([next(tokens) for _ in lanes], slack) for lanes in owners]


def _ranked_weights(lane: Lane, ranking: Ranking) -> list[float]:
    """What the entries were given by the last queries, the best first."""
    order = sorted(
        range(len(lane)), key=lambda i: (ranking.protected[i], ranking.scores[i], lane[i].position), reverse=True
    )
    return [ranking.scores[i] for i in order]


def _squares(values: list[float]) -> float:
    mean = statistics.fmean(values)
    return sum((x - mean) ** 2 for x in values)


def _in_pages(wanted: Sequence[float], total: int, page: int, lowest: int, highest: int | list[int]) -> list[int]:
    """Return tokens in whole pages, ``total`` pages together."""
    most = highest if isinstance(highest, list) else [highest] * len(wanted)
    given = [sorted((lowest, int(tokens // page), top))[1] for tokens, top in zip(wanted, most, strict=True)]
    while sum(given) < total:
        missing = {h: wanted[h] - given[h] * page for h in range(len(wanted)) if given[h] < most[h]}
        given[max(missing, key=lambda h: (missing[h], -h))] += 1
    while sum(given) > total:
        over = {h: given[h] * page - wanted[h] for h in range(len(wanted)) if given[h] > lowest}
        given[max(over, key=lambda h: (over[h], -h))] -= 1
    return [pages * page for pages in given]


NEAR_SHARE = 1e-4
"""Shares of attention that are nearer are equal to fp32: 800 of its roundings, of sums of not more than 150 weights."""

Owners = list[list[Lane]]
BUDGETS: dict[str, Callable[[Owners, list[list[Ranking]], int, Moment], list[Budgets]]] = {
    "adakv": adakv,
    "fastgen": fastgen,
    "kvzip": kvzip,
    "kvzap": kvzap,
    "pyramid": pyramid,
    "simlayer": simlayer,
    "squeeze": squeeze,
    "keydiff+adakv": adakv,
    "h2o+pyramid": pyramid,
    "keydiff+squeeze": squeeze,
}
