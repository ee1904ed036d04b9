"""Budgets that the KV heads of a cache share: what is refused, and how many tokens each head asks for."""

import pytest
import torch

from kvforge.common.errors import BuildError
from kvforge.kv_policies import parse
from kvforge.kv_policies.eviction.rules.adakv import AdaKV
from kvforge.kv_policies.policy import OwnerCache


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("adakv:floor_percent=101", "floor_percent is 101; give at most 100"),
        ("adakv:window=0", "window is 0; give at least 1"),
        ("adakv:budget=16", "an eviction leaves 16 tokens, but 32 are protected"),
    ],
)
def test_bad_parameters_are_refused(text: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        parse(text)


def test_parts_of_pages_are_refused() -> None:
    with pytest.raises(BuildError, match="budget 72 is no multiple of the 16 tokens of a page; give 64 or 80"):
        AdaKV(budget=72).check(num_kv_heads=4, head_dim=64, page_size=16)
    AdaKV(budget=64).check(num_kv_heads=4, head_dim=64, page_size=16)


def test_the_best_of_all_heads_stay_and_a_floor_of_each() -> None:
    policy = AdaKV(budget=4, window=1, floor_percent=25)
    best = torch.tensor([[9.0, 8, 7, 6, 5, 4], [9, 3, 2, 1, 0, 0]])
    assert policy.wanted(best) == [6, 2]
    assert AdaKV(budget=4, window=1, floor_percent=100).wanted(best) == [4, 4]
    assert AdaKV(budget=4, window=3, floor_percent=0).wanted(best) == [5, 3]
    assert policy.wanted(torch.zeros(2, 6)) == [4, 4]  # of equal scores, those that are higher in their heads
    assert policy.wanted(torch.tensor([[torch.inf] * 6, [0.0] * 6])) == [6, 2]


def test_bounds_of_a_heads_pages() -> None:
    policy = AdaKV(budget=64, window=10, floor_percent=20)
    assert (policy.min_pages(16), policy.max_pages(4, 16)) == (1, 13)
    assert (policy.min_pages(1), policy.max_pages(4, 1)) == (12, 4 * 64 - 3 * 12)
    assert policy.max_pages(1, 16) == 4


def test_bytes_are_those_of_equal_budgets_and_the_lists_of_columns() -> None:
    cache = OwnerCache(num_kv_heads=4, head_dim=64, page_size=16, element_bits=16)
    shared, equal = AdaKV(budget=64, window=10), parse("snapkv:budget=64,window=10")
    for prompt, generated in [(50, 3), (64, 9), (300, 0), (300, 40)]:
        more = shared.device_bytes(cache, prompt, generated) - equal.device_bytes(cache, prompt, generated)
        assert more == (4 * 4 * (1 + 13) if prompt > 64 else 0)
    pools = {pool.name: pool for pool in shared.state_pools(cache)}
    assert pools["lane_pages"].shape == (4,) and pools["lane_table"].shape == (4, 13)
