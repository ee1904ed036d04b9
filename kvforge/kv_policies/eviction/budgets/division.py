"""How many tokens and pages each KV head of a cache gets: numbers alone."""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heapreplace

from kvforge.kv_policies.eviction.names import Tensor


def divide_pages(
    wanted: Sequence[int | Fraction], num_pages: int, page_size: int, min_pages: int, max_pages: int | Sequence[int]
) -> list[int]:
    """Return whole pages for each head or owner, ``num_pages`` in all and ``min_pages`` to ``max_pages`` each, which
    may be a number for all or one of each.

    ``wanted`` are tokens. A head gets the pages that it fills, then one more in the order of what remains (Hamilton's
    method), of equals the lower head first, until all are given away. ``num_pages`` is within what the bounds allow.
    """
    most = [max_pages] * len(wanted) if isinstance(max_pages, int) else max_pages
    pages = [min(max(int(tokens // page_size), min_pages), bound) for tokens, bound in zip(wanted, most, strict=True)]
    rest = [tokens - given * page_size for tokens, given in zip(wanted, pages, strict=True)]
    left = num_pages - sum(pages)
    step, bounds = (1, most) if left > 0 else (-1, [min_pages] * len(pages))
    heads = [(-step * rest[head], head) for head, given in enumerate(pages) if given != bounds[head]]
    heapify(heads)
    for _ in range(abs(left)):
        remains, head = heads[0]
        pages[head] += step
        if pages[head] == bounds[head]:
            heappop(heads)
        else:
            heapreplace(heads, (remains + page_size, head))
    return pages


def best_of_all(score: Tensor, floor: int, budget: int) -> list[int]:
    """Return how many tokens each of some heads keeps, by ``score`` ``[heads, L]`` float32, each head's best tokens
    first in it: ``floor`` and those among the best of all heads' other tokens, ``heads * budget`` in all. Of equal
    scores one of more of its head's best before it comes later, then that of a higher head."""
    num_heads, length = score.shape
    floor = min(floor, length)
    others = score[:, floor:]
    wanted = num_heads * (budget - floor)
    if wanted >= others.numel():
        return [length] * num_heads
    if wanted <= 0:
        return [floor] * num_heads
    last = others.flatten().kthvalue(others.numel() - wanted + 1).values
    counts = (others > last).sum(1)
    ties = (others == last).T.nonzero()[: wanted - int(counts.sum()), 1]
    counts += ties.bincount(minlength=num_heads)
    return [floor + more for more in counts.tolist()]
