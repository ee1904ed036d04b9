"""What must hold between any two steps; tests check it after every one."""

from collections import Counter

from kvforge.runtime.scheduler import Scheduler
from kvforge.runtime.sequence import Status


def check_invariants(scheduler: Scheduler) -> None:
    """Raise AssertionError on the first broken invariant.

    - Pages are conserved: free, cached and referenced pages are disjoint and are all pages.
    - A page's reference count is the number of sequences that hold it.
    - A cached page is published and queued by its priority; a free page is not.
    - Waiting sequences hold nothing; running ones hold exactly the pages of what is computed, each in its own
      slot, and the slot table agrees with them.
    - Drafts are proposed for unfinished sequences only.
    """
    pool, slots, config = scheduler.pool, scheduler.slots, scheduler.config
    holders: Counter[int] = Counter()
    for sequence in scheduler.running:
        holders.update(sequence.pages)
    for page, count in enumerate(pool.ref_counts):
        assert count == holders[page], f"page {page} has {count} references and {holders[page]} holders"
    queued = [page for page in pool.cached_pages]
    assert len(queued) == len(set(queued)) == len(pool.cached_pages), "a page is cached twice"
    assert [pool.priorities[page] for page in queued] == sorted(pool.priorities[page] for page in queued), "priorities"
    free, cached = set(pool.free_pages), set(queued)
    assert len(free) == len(pool.free_pages), "a page is free twice"
    assert not free & cached, f"pages {free & cached} are free and cached"
    both = (free | cached) & holders.keys()
    assert not both, f"pages {both} are held and available"
    assert len(free) + len(cached) + len(holders) == pool.num_pages, "pages are lost"
    assert all(scheduler.prefix_cache.holds(page) for page in cached), "a cached page is not published"
    assert not any(scheduler.prefix_cache.holds(page) for page in free), "a free page is published"

    used_slots = [sequence.slot for sequence in scheduler.running]
    assert sorted(used_slots + slots.free_slots) == list(range(config.max_num_seqs)), "slots are lost"
    for sequence in scheduler.running:
        assert sequence.status is Status.RUNNING and sequence.num_computed < sequence.length, sequence
        assert len(sequence.pages) == scheduler.pages_for(sequence.num_computed), sequence
        assert len(set(sequence.pages)) == len(sequence.pages), sequence
        assert slots.num_computed[sequence.slot] == sequence.num_computed, sequence
        assert slots.page_table[sequence.slot, : len(sequence.pages)].tolist() == sequence.pages, sequence
    for sequence in scheduler.waiting:
        assert sequence.status is Status.WAITING and not sequence.pages and sequence.slot == -1, sequence
        assert sequence.num_computed == 0, sequence
    assert all(sequence.status is not Status.FINISHED for sequence in scheduler.proposals), "drafts of a finished one"
    for ordered in (scheduler.waiting, scheduler.running):
        orders = [sequence.order for sequence in ordered]
        assert orders == sorted(set(orders)), "a queue is out of order"
