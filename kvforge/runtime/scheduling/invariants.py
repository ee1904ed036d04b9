"""What must hold between any two steps; tests check it after every one."""

from collections import Counter

from kvforge.runtime.requests.sequence import PredictedPrompt, Sequence, Status
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.scheduler import Scheduler


def check_invariants(scheduler: Scheduler, in_flight: Schedule | None = None) -> None:
    """Raise AssertionError on the first broken invariant.

    - Pages are conserved: free, cached and referenced pages are disjoint and are all pages.
    - A page's reference count is the number of sequences and of fetches that hold it; fetches are of waiting sequences.
    - A cached page is published and queued by its priority; a free page is not.
    - Waiting sequences hold nothing; running ones hold exactly the pages of what is computed, and what a step
      ``in_flight`` computes, each in its own slot, and the slot table agrees with them. All their tokens are known.
    - State pages are conserved: each is free or held by one running sequence, which has as many as its policy says, and
      the slot table has them.
    - Upper pages are conserved as pages are: the holders of each are the running sequences that have it, each of which
      has those of its tokens that go past a blind cut. One of anchors has the holders of the lower page with the same
      tokens, and is cached where that is.
    - Exact pages are conserved: each is free or held by one running sequence, which has one if its newest page is not
      full, and the slot table has it.
    - Rows of states are conserved: each is free or owned by one running sequence, which has one between steps. Each
      snapshot is free, kept behind one published page, or read by a running sequence; a sequence reads its own row, a
      snapshot, or none at its start, and writes its own.
    - A sequence's cache is as its policy says where it is, or is about to be changed, and so is what the policy keeps
      of it in the slots. Where a transition keeps no page or rewrites those that it keeps, they have one holder and are
      not published; elsewhere those that were filled after it.
    - A predicted prompt is predicted whole before the model computes any of it, in an interval that is its; it is not
      published.
    - Drafts are proposed for unfinished sequences only.
    """
    pool, slots, config = scheduler.pool, scheduler.slots, scheduler.config
    holders: Counter[int] = Counter()
    for sequence in scheduler.running:
        holders.update(sequence.pages)
    for fetch in scheduler.fetches.by_sequence.values():
        holders.update(fetch.pages)
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

    assert not scheduler.awaited, "a token is not known"
    ends = _ends(scheduler, in_flight)
    used_slots = [sequence.slot for sequence in scheduler.running]
    assert sorted(used_slots + slots.free_slots) == list(range(config.max_num_seqs)), "slots are lost"
    for sequence in scheduler.running:
        assert sequence.status is Status.RUNNING and sequence.num_computed < sequence.length, sequence
        num_held = max(ends[sequence], sequence.num_predicted)
        assert len(sequence.pages) == scheduler.pages_for(num_held + sequence.cache_offset), sequence
        assert len(set(sequence.pages)) == len(sequence.pages), sequence
        assert slots.num_computed[sequence.slot] == sequence.num_computed, sequence
        assert slots.page_table[sequence.slot, : len(sequence.pages)].tolist() == sequence.pages, sequence
    for sequence in scheduler.waiting:
        assert sequence.status is Status.WAITING and not sequence.pages and sequence.slot == -1, sequence
        assert sequence.num_computed == 0 and not sequence.state_pages and sequence.cache_offset == 0, sequence
    fetches = scheduler.fetches.by_sequence
    assert fetches.keys() <= set(scheduler.waiting), "a fetch of a sequence that does not wait"
    _check_predictions(scheduler)
    _check_upper_pages(scheduler)
    _check_policy(scheduler)
    _check_exact_pages(scheduler, ends)
    _check_state_rows(scheduler)
    assert all(one.status is not Status.FINISHED for one in scheduler.drafts.proposals), "drafts of a finished one"
    for ordered in (scheduler.waiting, scheduler.running):
        orders = [sequence.order for sequence in ordered]
        assert orders == sorted(set(orders)), "a queue is out of order"


def _ends(scheduler: Scheduler, in_flight: Schedule | None) -> dict[Sequence, int]:
    ends = {sequence: sequence.num_computed for sequence in scheduler.running}
    if in_flight is not None:
        for sequence, count in [*((one, 1) for one in in_flight.decodes), *in_flight.prefills]:
            if sequence.status is not Status.FINISHED:
                ends[sequence] += count
    return ends


def _check_predictions(scheduler: Scheduler) -> None:
    for sequence in scheduler.running:
        if (predicted := sequence.predicted) is None:
            continue
        assert 0 <= predicted.num_done <= predicted.num_tokens <= sequence.num_prompt_tokens, sequence
        if sequence.is_predicting:
            assert sequence.num_computed == 0 and not predicted.intervals, sequence
        else:
            assert predicted.intervals[0][0] <= sequence.num_computed < sequence.end_of_piece, sequence
            assert predicted.intervals[-1][1] == sequence.num_prompt_tokens, sequence
            assert not any(scheduler.prefix_cache.holds(page) for page in sequence.pages), "predicted and published"
    for sequence in scheduler.waiting:
        assert sequence.predicted in (None, PredictedPrompt(sequence.num_prompt_tokens)), sequence


def _check_upper_pages(scheduler: Scheduler) -> None:
    upper, slots, below = scheduler.upper_pages, scheduler.slots, scheduler.pool
    holders = Counter(page for sequence in scheduler.running for page in sequence.upper_pages)
    assert [holders[page] for page in range(upper.pool.num_pages)] == upper.pool.ref_counts, "holders of upper pages"
    cached, free = set(upper.pool.cached_pages), set(upper.pool.free_pages)
    assert len(free) == len(upper.pool.free_pages), "an upper page is free twice"
    assert sorted([*free, *cached, *holders]) == list(range(upper.pool.num_pages)), "upper pages are lost or held twice"
    assert len(set(upper.above.values())) == len(upper.above), "an upper page is above two"
    assert cached <= set(upper.above.values()), "a cached upper page belongs to no other"
    for lower, page in upper.above.items():
        assert below.ref_counts[lower] == upper.pool.ref_counts[page], "one of two pages of anchors is held alone"
        assert (lower in set(below.cached_pages)) == (page in cached), "one of two pages of anchors is cached alone"
    for sequence in scheduler.running:
        pages = sequence.upper_pages
        assert len(pages) == upper.pages_for(sequence, sequence.num_computed), sequence
        assert slots.upper_table[sequence.slot, : len(pages)].tolist() == pages, sequence
        anchors = [upper.above[page] for page in sequence.pages[: len(pages)] if page in upper.above]
        assert anchors == pages[: len(anchors)], sequence
    assert not any(sequence.upper_pages for sequence in scheduler.waiting), "a waiting sequence holds upper pages"


def _check_exact_pages(scheduler: Scheduler, ends: dict[Sequence, int]) -> None:
    exact, slots = scheduler.exact_pages, scheduler.slots
    pages = [page for held in exact.held.values() for page in held.values()]
    assert sorted(pages + exact.free_pages) == list(range(exact.num_pages)), "exact pages are lost or held twice"
    assert exact.held.keys() <= set(scheduler.running), "a sequence that does not run holds exact pages"
    for sequence in scheduler.running:
        first, end = sequence.num_computed // scheduler.config.page_size, scheduler.pages_for(ends[sequence])
        held = exact.held.get(sequence, {})
        assert list(held) == (list(range(first, end)) if exact.is_used else []), sequence
        for index, page in held.items():
            assert slots.write_table[sequence.slot, index] == page, sequence


def _check_state_rows(scheduler: Scheduler) -> None:
    rows, slots = scheduler.state_rows, scheduler.slots
    if not rows.is_used:
        return
    assert rows.owned.keys() == set(scheduler.running), "rows of a sequence that does not run, or none of one that does"
    assert not rows.drafts and not rows.planned, "rows of a step that is over"
    assert len(rows.owned) + len(rows.free_rows) == rows.num_rows, "rows of running sequences are lost"
    kept, read = set(rows.snapshots.values()), set(rows.read.values())
    assert len(kept) == len(rows.snapshots), "a snapshot is behind two pages"
    found = sorted([*rows.owned.values(), *rows.free_rows, *(kept | read), *rows.free_snapshots])
    assert found == list(range(rows.num_rows + rows.num_snapshots)), "rows are lost or held twice"
    assert +rows.num_readers == Counter(rows.read.values()), "readers of snapshots"
    assert all(map(scheduler.prefix_cache.holds, rows.snapshots)), "a snapshot behind a page that is not published"
    for sequence in scheduler.running:
        own, first = rows.owned[sequence], -1 if sequence.num_computed == 0 else rows.owned[sequence]
        assert slots.state_read[sequence.slot] == rows.read.get(sequence, first), sequence
        assert slots.state_write[sequence.slot] == own, sequence


def _check_policy(scheduler: Scheduler) -> None:
    policy, state, slots = scheduler.policy, scheduler.state_pages, scheduler.slots
    keeping = policy.keeping
    held = [page for sequence in scheduler.running for page in sequence.state_pages]
    assert sorted(held + state.free_pages) == list(range(state.num_pages)), "state pages are lost or held twice"
    for sequence in scheduler.running:
        assert len(sequence.state_pages) == state.needed(sequence), sequence
        columns = slice(len(sequence.state_pages))
        assert slots.state_table[sequence.slot, columns].tolist() == sequence.state_pages, sequence
        assert slots.cache_offset[sequence.slot] == sequence.cache_offset, sequence
        num_prompt, num_computed = sequence.num_prompt_tokens, sequence.num_computed
        assert num_computed <= sequence.next_transition, f"{sequence} is beyond a transition"
        if not sequence.is_due:
            cached, most = num_computed + sequence.cache_offset, policy.num_cached(num_prompt, num_computed)
            assert 0 <= cached <= most if keeping.keeps_by_content else cached == most, sequence
        values = tuple(int(slots.columns[name][sequence.slot]) for name in keeping.slot_columns)
        if num_computed >= sequence.first_transition and sequence.next_transition != sequence.first_transition:
            if not sequence.is_due:
                assert values == keeping.slot_values(num_prompt, num_computed), sequence
            kept = policy.kept_pages(num_prompt, num_computed, scheduler.config.page_size)
            own = 0 if keeping.rewrites_pages or not kept else sequence.first_transition // scheduler.config.page_size
            for page in sequence.pages[own:]:
                assert scheduler.pool.ref_counts[page] == 1, f"page {page} of a changed cache is shared"
                assert not scheduler.prefix_cache.holds(page), f"page {page} of a changed cache is published"
        else:
            assert sequence.cache_offset == 0, sequence
            if not sequence.is_due:
                assert values == keeping.slot_values(num_prompt, num_computed), sequence
    for row in slots.free_slots:
        columns_of_row = (slots.cache_offset, *slots.columns.values())
        assert not any(column[row] for column in columns_of_row), f"slot {row} is not reset"
