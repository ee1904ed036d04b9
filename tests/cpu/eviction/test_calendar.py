"""When caches are cut down, and how large they are: numbers against a simulation token by token."""

import random

import pytest

from kvforge.common.errors import BuildError
from kvforge.kv_policies import OwnerCache, parse, policies
from kvforge.kv_policies.eviction.calendar import Calendar, When
from kvforge.kv_policies.eviction.noted import NotesTokens
from kvforge.kv_policies.eviction.policy import NOT_OBSERVED, Eviction

CACHE = OwnerCache(num_kv_heads=2, head_dim=8, page_size=4, element_bits=16)
RULES = [name for name, policy in policies().items() if issubclass(policy, Eviction)]
SMALL = {"roco": ",spread=8"}
"""What is said to rules whose defaults protect more than a budget of 40 has room for."""


def simulated(calendar: Calendar, num_prompt: int, num_tokens: int) -> list[tuple[int, int, bool]]:
    """(cached before, cached after, evicted) at each number of computed tokens."""
    cached, found = 0, []
    for computed in range(num_tokens + 1):
        before = cached
        is_full = cached >= calendar.budget
        if calendar.when is When.ALWAYS:
            evicts = is_full
        elif calendar.when is When.END_DECODE:
            evicts = is_full and computed >= num_prompt
        else:
            evicts = computed == num_prompt and cached > calendar.budget
        if evicts:
            cached = calendar.kept
        found.append((before, cached, evicts))
        cached += 1
    return found


@pytest.mark.parametrize("when", list(When))
def test_numbers_equal_a_simulation(when: When) -> None:
    rng = random.Random(str(when))
    for _ in range(150):
        budget = rng.randint(2, 30)
        calendar = Calendar(budget, rng.randint(1, budget - 1), when)
        num_prompt = rng.randint(1, 70)
        steps = simulated(calendar, num_prompt, 160)
        evictions = [computed for computed, (_, _, evicts) in enumerate(steps) if evicts]
        assert calendar.first(num_prompt) == (evictions[0] if evictions else None)
        for computed, (before, after, evicts) in enumerate(steps[:121]):
            assert calendar.cached(num_prompt, computed) == after
            assert calendar.next(num_prompt, computed) == next((at for at in evictions if at >= computed), None)
            assert calendar.previous(num_prompt, computed) == max(
                (at for at in evictions if at < computed), default=None
            )
            if evicts:
                assert calendar.cached_before(num_prompt, computed) == before
        for _ in range(30):
            start, end = sorted(rng.randint(0, 120) for _ in range(2))
            most = max([steps[start][1], *(before for before, _, _ in steps[start + 1 : end + 1])])
            assert calendar.max_cached(num_prompt, end, start) == most, (calendar, num_prompt, start, end)


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_asks_for_is_enough(rule: str) -> None:
    """State pages hold the largest cache that is still cut down; bytes are those of pages, state and slots."""
    policy = parse(f"{rule}:budget=40{SMALL.get(rule, '')}")
    assert isinstance(policy, Eviction)
    rng = random.Random(rule)
    for _ in range(100):
        num_prompt, generated = rng.randint(1, 120), rng.randint(0, 60)
        pages = policy.keeping.num_state_pages(num_prompt, 4)
        for computed in range(num_prompt + generated + 1):
            at = policy.next_transition(num_prompt, computed)
            if at is not None:
                assert policy.calendar.cached_before(num_prompt, at) <= 4 * pages
        cached = policy.num_cached(num_prompt, num_prompt + generated)
        assert policy.device_bytes(CACHE, num_prompt, generated) >= CACHE.padded(cached) * CACHE.token_bytes
        assert policy.device_bytes_read(CACHE, num_prompt, generated) >= cached * CACHE.token_bytes
        of_any_prompt = policy.prefill_bytes(CACHE, 0)
        assert bool(of_any_prompt) == bool(policy.probing)
        token_bytes = CACHE.token_bytes + (4 * CACHE.num_kv_heads if rule == "kvzap" else 0)
        assert policy.prefill_bytes(CACHE, num_prompt) - of_any_prompt == token_bytes * (
            CACHE.padded(policy.max_cached(num_prompt, num_prompt))
            - CACHE.padded(policy.num_cached(num_prompt, num_prompt))
        )


@pytest.mark.parametrize("rule", RULES)
def test_observed_queries_are_the_last_ones_before_each_eviction(rule: str) -> None:
    policy = parse(f"{rule}:budget=40{SMALL.get(rule, '')}")
    assert isinstance(policy, Eviction)
    for num_prompt in (1, 30, 40, 41, 100):
        for computed in range(0, 140):
            start = policy.observe_from(num_prompt, computed)
            following = policy.calendar.next(num_prompt, computed + 1)
            if policy.statistic is None or following is None or policy.probing:
                assert start == NOT_OBSERVED
                noted = isinstance(policy, NotesTokens) and policy.note_from(num_prompt) <= computed < num_prompt
                assert policy.num_observers(num_prompt, computed, computed + 1) == noted
            elif policy.num_observed == 0:
                assert start == 0
                assert policy.num_observers(num_prompt, computed, following) == following - computed
            else:
                previous = policy.calendar.previous(num_prompt, computed + 1) or 0
                assert start == max(previous, following - policy.num_observed)
                assert policy.num_observers(num_prompt, computed, following) == following - max(start, computed)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("h2o:budget=0", "h2o: budget is 0; give at least 1."),
        ("h2o:budget=8,block=8", "h2o: block 8 must be below budget 8."),
        (
            "h2o:budget=8,block=5",
            "h2o: an eviction leaves 3 tokens, but 4 are protected; raise budget or lower what is",
        ),
        ("snapkv:budget=31", "snapkv: an eviction leaves 31 tokens, but 32 are protected"),
        ("streaming:budget=4", "streaming: an eviction leaves 3 tokens, but 4 are protected"),
        ("batchmax:budget=2000000", "batchmax: budget is 2000000; give at most 1048576."),
        ("scissorhands:history=0", "scissorhands: history is 0; give at least 1."),
    ],
)
def test_what_does_not_fit_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(BuildError, match=sentence):
        parse(text)


def test_the_block_is_the_rules_own_unless_given() -> None:
    assert str(parse("scissorhands:budget=100")).startswith("scissorhands:budget=100,block=50,")
    assert str(parse("batchmax:budget=20")) == "batchmax:budget=20,block=10,decode_only=0"
    assert str(parse("batchmax:budget=512")) == "batchmax:budget=512,block=64,decode_only=0"
    assert [parse(f"batchmax:budget={budget}").block for budget in (2, 64, 200, 1024)] == [1, 32, 64, 128]
    assert str(parse("h2o:budget=512")) == "h2o:budget=512,block=1"
    assert parse(str(parse("tova:block=3"))) == parse("tova:block=3")
