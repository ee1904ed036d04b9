"""Budgets that all owners share: how they are divided, what is refused, and that the memory is one."""

import random
from fractions import Fraction
from itertools import product

import pytest
import torch

from kvforge.common.errors import BuildError
from kvforge.kv_policies import parse
from kvforge.kv_policies.eviction.budget_lanes import ScoredLanes
from kvforge.kv_policies.eviction.budgets.pyramid import PyramidBudgets
from kvforge.kv_policies.eviction.budgets.squeeze import SqueezeBudgets, three_groups
from kvforge.kv_policies.eviction.expectation import expected_exponent
from kvforge.kv_policies.eviction.rules.expected import Expected
from kvforge.kv_policies.eviction.rules.simlayer import SimLayerKV
from kvforge.kv_policies.eviction.slots import Slots
from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.eviction.kept import Kept, KeptSets
from tests.support.models.small_models import small_session


def owner_of(mass: list[float], num_heads: int = 2) -> ScoredLanes:
    """Of a prompt, with what its last query gave each token."""
    length = len(mass)
    given = torch.tensor(mass).expand(1, num_heads, -1)
    numbers = (torch.full((1, 1, 1), float(length)) for _ in range(2))
    position = torch.arange(length).float().expand_as(given)
    slots = Slots(
        position, *numbers, {"mass": given}, *[lambda *_: given] * 3, lambda: (given, given), lambda *_: given > 4
    )
    return ScoredLanes.of(slots, given)


def pyramid(text: str) -> PyramidBudgets:
    policy = parse(text)
    assert isinstance(policy, PyramidBudgets)
    return policy


def test_a_pyramid_falls_along_a_line() -> None:
    policy = pyramid("pyramid:budget=50,window=16,beta=2")
    assert policy.wanted(4, 200) == [75, Fraction(175, 3), Fraction(125, 3), 25]
    assert policy.wanted(1, 200) == [50]
    assert policy.wanted(3, 60) == [60, 50, 40]  # a prompt of 60 has no 75
    assert pyramid("pyramid:budget=50,window=30,beta=20").wanted(3, 200) == [70, 50, 30]  # the window stays


def test_a_pyramid_in_whole_pages() -> None:
    policy = pyramid("pyramid:budget=48,window=4,beta=4")
    for length, pages in [(200, [5, 3, 1]), (64, [4, 3, 2]), (49, [3, 3, 3])]:
        owners = [owner_of([1.0] * length) for _ in range(3)]
        assert policy.divide(owners, 16) == [[n, n] for n in pages]
    assert max(pages) <= policy.max_pages(2, 16)


def test_the_least_lazy_keep_what_there_is() -> None:
    policy = parse("simlayer:budget=4,sinks=1,recent=1")
    assert isinstance(policy, SimLayerKV)
    shares = ([4.0, 1, 1, 1, 1, 1, 1, 5], [1.0, 3, 3, 3, 3, 3, 3, 1], [3.0, 1, 1, 1, 1, 1, 1, 3])
    owners = [owner_of(share) for share in shares]
    assert [policy.laziness(owner.slots) for owner in owners] == pytest.approx([9 / 15, 2 / 20, 6 / 12])
    assert policy.divide(owners, 1) == [[2, 2], [8, 8], [2, 2]]
    assert policy.divide([owner_of([1.0] * 8)] * 3, 1) == [[8, 8], [2, 2], [2, 2]]  # of equals the first
    capped = parse("simlayer:budget=4,sinks=1,recent=1,ceiling_percent=150")
    assert isinstance(capped, SimLayerKV) and capped.divide(owners, 1) == [[2, 2], [6, 6], [4, 4]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pyramid:beta=0", "pyramid: beta is 0; give at least 1"),
        ("pyramid:budget=16", "an eviction leaves 16 tokens, but 32 are protected"),
        ("simlayer:budget=64,recent=100", "an eviction leaves 64 tokens, but 104 are protected"),
        ("squeeze:share_percent=101", "squeeze: share_percent is 101; give at most 100"),
        ("squeeze:ceiling_percent=99", "squeeze: ceiling_percent is 99; give at least 100"),
        ("squeeze:similar=4097", "squeeze: similar is 4097; give at most 4096"),
        ("simlayer:ceiling_percent=4000", "simlayer: ceiling_percent is 4000; give at most 3200"),
        ("expected:window=5000", "expected: window is 5000; give at most 4096"),
        ("expected:covariance=2", "expected: covariance is 2; give at most 1"),
        ("simlayer:ceiling_percent=50", "simlayer: ceiling_percent is 50; give at least 100"),
        (
            "snapkv+simlayer",
            "the KV policy snapkv cannot be combined with 'simlayer'; choose from adakv, pyramid, squeeze",
        ),
        (
            "pyramid+adakv",
            "the KV policy pyramid cannot be combined with 'adakv'; leave the rest out, or combine it with one of "
            "batchmax, h2o, keydiff, recent, roco, scissorhands, snapkv, tova.$",
        ),
        ("streaming+adakv", "the KV policy streaming cannot be combined with 'adakv'; leave the rest out, or combine"),
        ("full+sinks", "the KV policy full cannot be combined with 'sinks'; leave the rest out.$"),
        ("h3o+adakv", "the KV policy 'h3o' is unknown"),
        (
            "keydiff+adakv:window=3",
            "the KV policy keydiff.adakv has no parameter 'window'; it has budget, block, floor_",
        ),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        parse(text)


def test_a_rule_with_budgets_of_another_paper_says_so() -> None:
    policy = parse("keydiff+adakv:budget=64,floor_percent=30")
    assert policy == parse(str(policy)) and policy.name == "keydiff+adakv"
    assert str(policy) == "keydiff+adakv:budget=64,block=32,floor_percent=30"
    assert type(policy) is type(parse("keydiff+adakv"))


def test_all_owners_have_one_memory() -> None:
    session = small_session({"kv_policy": "pyramid:budget=12,window=3", "kv_dtype": "int8"}, head_dim=10, cut=1)
    engine = LLMEngine(session=session, num_pages=7)
    pools, owners = engine.runner.pools, session.manifest.model.num_owners
    for role in range(4):
        assert len({pool[role].data_ptr() for pool in pools}) == 1
        assert pools[0][role].shape[0] == owners * 7
    assert len({pool[4].data_ptr() for pool in pools}) == owners  # positions are each owner's


def test_three_groups_have_the_least_squares() -> None:
    assert three_groups([0.9, 0.1, 0.91, 0.5, 0.12]) == [2, 0, 2, 1, 0]
    assert three_groups([0.3, 0.2, 0.3]) == [1, 0, 1] and three_groups([0.3]) == [0]
    for seed in range(50):
        rng = random.Random(seed)
        values = [rng.random() for _ in range(rng.randint(3, 7))]

        def cost(groups: list[int], values: list[float] = values) -> float:
            parts = [[x for x, group in zip(values, groups, strict=True) if group == one] for one in range(3)]
            return sum((x - sum(part) / len(part)) ** 2 for part in parts if part for x in part)

        best = min(map(cost, map(list, product(range(3), repeat=len(values)))))
        assert cost(three_groups(values)) == pytest.approx(best)


def test_the_most_similar_keep_a_share_and_the_others_what_is_left() -> None:
    policy = parse("squeeze:budget=40,window=4,share_percent=25")
    assert isinstance(policy, SqueezeBudgets)
    assert policy.wanted([0.1, 0.9, 0.5, 0.11, 0.92]) == [60, 10, 60, 60, 10]
    assert policy.wanted([0.5, 0.5]) == [40, 40]
    short = parse("squeeze:budget=40,window=30,share_percent=25")
    assert isinstance(short, SqueezeBudgets) and short.wanted([0.1, 0.5, 0.9]) == [45, 45, 30]


def test_what_another_sequence_noted_does_not_count() -> None:
    """A prompt shorter than what is noted leaves places of its row as they were."""
    text = "squeeze:budget=8,window=3,similar=32"
    session = small_session({"kv_policy": text}, head_dim=10, cut=6, group_size=1, num_layers=6)
    session._lower.embed.weight.mul_(100)  # so that the cosines of layers are near each other
    for block in session._lower.layers.values():
        block.down.weight.mul_(0.0)

    def kept(engine: LLMEngine, prompt: list[int], name: str) -> Kept:
        sets = KeptSets(engine)
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
        return sets.of(name, 0)

    rng, found = random.Random(1), set()
    for index in range(6):
        prompt, other = ([rng.randrange(3, 96) for _ in range(n)] for n in (18, 32))
        fresh, used = (LLMEngine(session=session, num_pages=40, max_num_seqs=1) for _ in range(2))
        kept(used, other, "other")
        alone = kept(fresh, prompt, "alone")
        assert kept(used, prompt, "again") == alone, index
        found.add(tuple(len(heads[0]) for heads in alone[18]))
    assert len(found) > 1  # or the cosines decide nothing


def test_parts_of_pages_are_refused_with_what_would_do() -> None:
    with pytest.raises(BuildError, match=r"budget 8 is no multiple of the 16 tokens of a page; give 16\.$"):
        parse("keydiff+adakv:budget=8").check(num_kv_heads=2, head_dim=16, page_size=16)
    with pytest.raises(BuildError, match=r"give 32\.$"):
        parse("keydiff+adakv:budget=17,block=16").check(num_kv_heads=2, head_dim=16, page_size=16)


def test_expected_weights_that_float32_has_not_keep_their_order() -> None:
    torch.manual_seed(0)
    keys, queries, angles = 10 * torch.randn(1, 1, 200, 16), 10 * torch.randn(1, 65, 1, 16), torch.randn(300, 8)
    rope, like = (angles.cos(), angles.sin()), torch.arange(200.0).expand(1, 1, -1)
    numbers = (torch.full((1, 1, 1), 200.0) for _ in range(2))
    slots = Slots(
        like,
        *numbers,
        {},
        lambda: keys,
        lambda: torch.ones_like(keys),
        lambda name: queries,
        lambda: rope,
        lambda *_: like > 0,
    )
    policy = Expected(budget=20, sinks=0, future=50)
    exponent = expected_exponent(queries[0, :64], keys[0], rope, 50, True)[0, 0]
    assert exponent.max() - exponent.min() > 200  # beyond float32's exponentials
    assert policy.score(slots)[0, 0].argsort()[-40:].tolist() == exponent.argsort()[-40:].tolist()
