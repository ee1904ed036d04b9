"""How long a request's pages stay in the prefix cache, compared with those of others."""

import numpy as np

from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.page_pool import DEFAULT_PRIORITY, PagePool
from kvforge.runtime.scheduling.prefix_cache import PrefixCache


def asked_priorities(
    retention: tuple[tuple[int, int, int], ...], num_tokens: int, num_pages: int, page_size: int
) -> list[int]:
    """Return what (start, end, priority) ranges of a prompt of ``num_tokens`` ask for each of a sequence's pages.

    A page of the prompt has the priority of the range that its first token is in (as in TensorRT-LLM), the last one
    if several are, and -1 outside of all. Generated pages have the default, or the priority of the prompt's last
    token where that is less.
    """
    prompt = np.full(num_tokens, -1, dtype=np.int64)
    for start, end, priority in retention:
        prompt[start : num_tokens if end == -1 else end] = priority
    last = int(prompt[-1])
    asked = np.full(num_pages, DEFAULT_PRIORITY if last == -1 else min(last, DEFAULT_PRIORITY))
    pages = prompt[::page_size][:num_pages]
    asked[: len(pages)] = pages
    return asked.tolist()


def set_priorities(pool: PagePool, cache: PrefixCache, sequence: Sequence) -> None:
    """Give the published pages of a sequence that asks for it their priorities, before it lets go of them.

    A page that it asks nothing for stays as it is. A page is worth at least as much as the page after it, which
    cannot be reached without it: so a prefix is given up from its end whatever the ranges are.
    """
    num_pages = sequence.num_computed // cache.page_size
    ranges = tuple(sequence.params.retention)
    asked = asked_priorities(ranges, sequence.num_prompt_tokens, num_pages, cache.page_size)
    after = 0
    for index in range(num_pages - 1, -1, -1):
        page = cache.page_of(sequence, index)
        if page is not None:
            after = max(pool.priorities[page] if asked[index] == -1 else asked[index], after)
            pool.set_priority(page, after)
