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
    - Shadow pages are conserved: each is free or held by one running sequence whose prompt will be or is factored,
      and the slot table has them.
    - Pages of a compact cache have one holder and are not published; of the slots, only those of factored sequences
      have chunks and a shift.
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
        assert len(sequence.pages) == scheduler.pages_for(sequence.num_computed + sequence.cache_shift), sequence
        assert len(set(sequence.pages)) == len(sequence.pages), sequence
        assert slots.num_computed[sequence.slot] == sequence.num_computed, sequence
        assert slots.page_table[sequence.slot, : len(sequence.pages)].tolist() == sequence.pages, sequence
    for sequence in scheduler.waiting:
        assert sequence.status is Status.WAITING and not sequence.pages and sequence.slot == -1, sequence
        assert sequence.num_computed == 0 and not sequence.shadow_pages and sequence.cache_shift == 0, sequence
    _check_factored(scheduler)
    assert all(sequence.status is not Status.FINISHED for sequence in scheduler.proposals), "drafts of a finished one"
    for ordered in (scheduler.waiting, scheduler.running):
        orders = [sequence.order for sequence in ordered]
        assert orders == sorted(set(orders)), "a queue is out of order"


def _check_factored(scheduler: Scheduler) -> None:
    shadow, slots = scheduler.shadow_pages, scheduler.slots
    held = [page for sequence in scheduler.running for page in sequence.shadow_pages]
    assert sorted(held + shadow.free_pages) == list(range(shadow.num_pages)), "shadow pages are lost or held twice"
    for sequence in scheduler.running:
        assert len(sequence.shadow_pages) == shadow.needed(sequence), sequence
        columns = slice(len(sequence.shadow_pages))
        assert slots.shadow_table[sequence.slot, columns].tolist() == sequence.shadow_pages, sequence
        assert sequence.cache_shift in (0, sequence.compact_shift), sequence
        assert slots.cache_shift[sequence.slot] == sequence.cache_shift, sequence
        assert (slots.num_chunks[sequence.slot] > 0) == (sequence.cache_shift < 0), sequence
        if sequence.cache_shift < 0:
            assert sequence.num_computed >= sequence.num_prompt_tokens, sequence
            for page in sequence.pages:
                assert scheduler.pool.ref_counts[page] == 1, f"page {page} of a compact cache is shared"
                assert not scheduler.prefix_cache.holds(page), f"page {page} of a compact cache is published"
        elif sequence.compact_shift < 0:
            assert sequence.num_computed <= sequence.num_prompt_tokens, sequence
    for row in slots.free_slots:
        assert slots.cache_shift[row] == slots.num_chunks[row] == slots.num_selected[row] == 0, (
            f"slot {row} is not reset"
        )
