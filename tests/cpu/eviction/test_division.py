"""Whole pages for KV heads that share a budget."""

import random

from kvforge.kv_policies.eviction.budgets.division import divide_pages


def test_pages_are_all_given_away_within_the_bounds() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        heads, size, lowest = rng.randint(1, 9), rng.choice((1, 4, 16)), rng.randint(0, 4)
        highest = lowest + rng.randint(0, 12)
        total = rng.randint(heads * lowest, heads * highest)
        wanted = [rng.randint(0, 20 * size) for _ in range(heads)]
        given = divide_pages(wanted, total, size, lowest, highest)
        assert sum(given) == total and all(lowest <= pages <= highest for pages in given), seed


def test_what_fits_is_given_as_it_is_wanted() -> None:
    assert divide_pages([8, 0, 16], 6, 4, 0, 6) == [2, 0, 4]
    assert divide_pages([5, 3, 7], 15, 1, 0, 15) == [5, 3, 7]


def test_one_page_more_goes_where_most_is_missing() -> None:
    assert divide_pages([7, 6, 3], 4, 4, 0, 9) == [2, 1, 1]
    assert divide_pages([6, 6, 4], 4, 4, 0, 9) == [2, 1, 1]  # of equals, the lower head


def test_bounds_come_before_wishes() -> None:
    assert divide_pages([16, 0, 0], 4, 4, 1, 2) == [2, 1, 1]
    assert divide_pages([0, 0, 24], 6, 4, 1, 3) == [2, 1, 3]
