"""Which cached pages are given up first: priorities, recency, and the ends of prefixes before their beginnings."""

import random
from collections import Counter

import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.scheduling.page_pool import DEFAULT_PRIORITY, PagePool
from kvforge.runtime.scheduling.retention import asked_priorities
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")


class PlainPool:
    """The pool by its definition: every page's state in a list, every question answered by looking at all pages."""

    def __init__(self, num_pages):
        self.holders = [0] * num_pages
        self.cached_at = [None] * num_pages
        self.priorities = [DEFAULT_PRIORITY] * num_pages
        self.clock = 0

    def tick(self):
        self.clock += 1
        return self.clock

    def cached(self):
        pages = [page for page, time in enumerate(self.cached_at) if time is not None]
        return sorted(pages, key=lambda page: (self.priorities[page], self.cached_at[page]))

    def free(self):
        return {p for p, (n, time) in enumerate(zip(self.holders, self.cached_at, strict=True)) if n == 0 and not time}

    def take(self, page):
        self.holders[page], self.cached_at[page], self.priorities[page] = 1, None, DEFAULT_PRIORITY


@pytest.mark.parametrize("seed", range(20))
def test_the_pool_gives_up_what_its_definition_says(seed):
    rng = random.Random(seed)
    evicted, plain = [], PlainPool(rng.randint(1, 12))
    pool = PagePool(len(plain.holders), evict=evicted.append)
    counts = Counter()
    for _ in range(600):
        page = rng.randrange(len(plain.holders))
        held, cached = plain.holders[page] > 0, plain.cached_at[page] is not None
        action = rng.choice(["allocate", "share", "release", "release", "priority"])
        if action == "allocate":
            before, free, known = len(evicted), plain.free(), plain.cached()
            got = pool.allocate()
            if free:
                assert got in free and len(evicted) == before
            else:
                assert got == (known[0] if known else None) and evicted[before:] == known[:1]
                counts["evicted"] += len(known) > 0
            if got is not None:
                plain.take(got)
        elif action == "share" and (held or cached):
            pool.share(page)
            plain.holders[page] += 1
            plain.cached_at[page] = None
        elif action == "release" and held:
            keep = rng.random() < 0.8
            pool.release(page, keep)
            plain.holders[page] -= 1
            if plain.holders[page] == 0 and keep:
                plain.cached_at[page] = plain.tick()
        elif action == "priority" and (held or cached):
            priority = rng.choice([0, 10, 35, 35, 80, 100])
            pool.set_priority(page, priority)
            plain.priorities[page] = priority
            if cached:
                plain.cached_at[page] = plain.tick()
        assert list(pool.cached_pages) == plain.cached() and len(pool.cached_pages) == len(plain.cached())
        assert set(pool.free_pages) == plain.free() and pool.ref_counts == plain.holders
        assert pool.num_used == sum(n > 0 for n in plain.holders)
    assert counts["evicted"] > 0


@pytest.mark.parametrize(
    "retention, num_tokens, page_size, expected",
    [
        ((), 8, 4, [-1, -1, 35]),
        (((0, 64, 80), (64, 128, 50)), 256, 64, [80, 50, -1, -1, 35]),
        (((0, 63, 80), (63, 127, 30)), 127, 32, [80, 80, 30, 30, 30]),
        (((0, 1, 80), (1, 2, 5)), 128, 32, [80, -1, -1, -1, 35]),
        (((2, -1, 90),), 11, 4, [-1, 90, 90, 35]),
        (((0, -1, 0),), 5, 4, [0, 0, 0, 0]),
        (((0, -1, 10), (4, 8, 60), (900, 950, 1)), 9, 4, [10, 60, 10, 10]),
    ],
)
def test_a_page_has_the_priority_of_its_first_token(retention, num_tokens, page_size, expected):
    assert asked_priorities(retention, num_tokens, len(expected), page_size) == expected


def test_more_ranges_than_anyone_needs_are_refused():
    with pytest.raises(RequestError, match="retention has 1001 entries; give at most 1000"):
        SamplingParams(retention=[(0, 1, 1)] * 1001)


def serve(engine, prompt, **changes):
    """Run one request to its end; returns how many of its pages were there already."""
    engine.add_request("one", prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 1, **changes}))
    while engine.has_unfinished():
        outputs = engine.step()
        engine.check_invariants()
    return outputs[-1].metrics.num_reused_pages


def prompt_of(token, num_pages=3):
    return [token] * (4 * num_pages + 1)


def test_a_kept_prefix_outlives_many_others_and_a_passing_one_goes_first():
    engine = LLMEngine(session=FakeSession(), num_pages=12)
    serve(engine, prompt_of(5), retention=[(0, -1, 90)])
    serve(engine, prompt_of(6), retention=[(0, -1, 0)])
    serve(engine, prompt_of(7))
    serve(engine, prompt_of(8))
    assert serve(engine, prompt_of(7)) == 3, "of the older ones the one asked to go went"
    for token in range(9, 20):
        serve(engine, prompt_of(token))
    assert serve(engine, prompt_of(5)) == 3
    assert serve(engine, prompt_of(6)) == serve(engine, prompt_of(7)) == 0


def test_a_worthy_end_keeps_its_beginning():
    engine = LLMEngine(session=FakeSession(), num_pages=10)
    serve(engine, prompt_of(5), retention=[(0, 8, 1), (8, -1, 70)])
    for token in range(9, 15):
        serve(engine, prompt_of(token))
    assert serve(engine, prompt_of(5)) == 3
    serve(engine, prompt_of(5), retention=[(0, -1, 2)])
    for token in range(9, 15):
        serve(engine, prompt_of(token))
    assert serve(engine, prompt_of(5)) == 0, "a later request asked for less"


def test_a_beginning_that_goes_before_its_end_comes_back_whole():
    """Another branch asked for less of what both share; the worthier end waits until the beginning is there again."""
    engine = LLMEngine(session=FakeSession(), num_pages=8)
    shared, worthy, poor = [5] * 8, [6] * 5, [7] * 5
    serve(engine, shared + worthy, retention=[(0, -1, 70)])
    serve(engine, shared + poor, retention=[(0, -1, 2)])
    assert serve(engine, prompt_of(9, 6)) == 0
    assert serve(engine, shared + worthy) == 0, "its beginning is gone"
    assert serve(engine, shared + worthy) == 3, "published anew"


def test_a_page_published_by_another_gets_the_priority_too():
    engine = LLMEngine(session=FakeSession(), num_pages=60)
    for name, retention in (("first", ()), ("second", [(0, -1, 100)])):
        params = SamplingParams(temperature=0.0, max_tokens=1, retention=retention)
        engine.add_request(name, prompt_of(5), params)
    engine.requests["second"].sequences[0].num_awaited_pages = 3  # it waits no more, and computes the same pages
    engine.step()
    pool = engine.scheduler.pool
    assert not engine.has_unfinished() and [pool.priorities[page] for page in pool.cached_pages] == [100] * 3
    engine.check_invariants()
