"""Whole pages for KV heads that share a budget."""

import random

import torch

from kvforge.kv_policies.eviction.budget_lanes import ScoredLanes
from kvforge.kv_policies.eviction.budgets.division import best_of_all, divide_pages


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


def random_scores(rng: random.Random) -> torch.Tensor:
    """Few different numbers, both zeros, infinities and what is no number."""
    of = [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
        *(rng.choice((1, 4096)) * rng.randint(-9, 9) / 8 for _ in range(6)),
    ]
    heads, length = rng.randint(1, 5), rng.randint(0, 40)
    return torch.tensor([rng.choice(of) for _ in range(heads * length)]).reshape(heads, length)


def test_lanes_have_their_best_tokens_first_and_of_equals_the_newer(seeds) -> None:
    for seed in seeds(100, 400):
        score = random_scores(random.Random(seed))
        clean = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        found = ScoredLanes.of(None, score[None])
        for own, best, order in zip(clean.tolist(), found.best.tolist(), found.order.tolist(), strict=True):
            assert order == sorted(range(len(own)), key=lambda token: (own[token], token), reverse=True), seed
            assert best == [own[token] for token in order], seed


def test_the_best_of_all_heads_are_kept_behind_the_floor(seeds) -> None:
    for seed in seeds(100, 400):
        rng = random.Random(seed)
        score = ScoredLanes.of(None, random_scores(rng)[None]).best
        (heads, length), floor = score.shape, rng.randint(0, 5)
        budget = floor + rng.randint(0, 30)
        counts = [min(floor, length)] * heads
        others = [(-float(score[head, rank]), rank, head) for head in range(heads) for rank in range(counts[0], length)]
        for _, _, head in sorted(others)[: heads * (budget - counts[0])]:
            counts[head] += 1
        assert best_of_all(score, floor, budget) == counts, seed
