"""What of a prompt is computed where the rest is predicted."""

import itertools
import random

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.common.exact_intervals import ExactTokens, merge


def test_intervals_are_those_of_their_tokens() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        size = rng.randint(1, 60)
        exact = ExactTokens(
            rng.randint(0, 70), rng.randint(1, 70), rng.choice([0.0, rng.random(), 1.0]), rng.randint(1, 9)
        )
        scores = [rng.random() for _ in range(size)]
        found = exact.intervals(size, scores)
        tokens = {position for start, end in found for position in range(start, end)}
        assert found[-1][1] == size and all(start < end for start, end in found)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
        assert (
            set(range(min(exact.first, size))) | set(range(max(0, size - exact.last), size))
            <= tokens
            <= set(range(size))
        )
        if exact.share == 1:
            assert found == ((0, size),)
        assert len(tokens) >= round(exact.share * size)
        assert len(tokens) <= exact.first + exact.last + round(exact.share * size) + exact.block - 1


def test_the_most_important_blocks_are_taken() -> None:
    scores = [0.0] * 32
    scores[9], scores[21] = 5.0, 3.0
    assert ExactTokens(share=4 / 32, block=4).intervals(32, scores) == ((8, 12), (31, 32))
    assert ExactTokens(share=8 / 32, block=4).intervals(32, scores) == ((8, 12), (20, 24), (31, 32))
    assert ExactTokens(2, 3, share=4 / 32, block=4).intervals(32, [1.0] * 32) == ((0, 4), (29, 32))  # equal: the first


def test_merging() -> None:
    assert merge([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7)]) == ((0, 3), (4, 9))
    assert merge([]) == ()


@pytest.mark.parametrize("bad", [{"first": -1}, {"last": 0}, {"share": 1.5}, {"share": float("nan")}, {"block": 0}])
def test_what_makes_no_sense_is_refused(bad: dict) -> None:
    with pytest.raises(KvforgeError, match=r"give|always"):
        ExactTokens(**bad)


def test_a_short_last_block_counts_by_its_mean() -> None:
    exact = ExactTokens(share=1 / 3, block=4)
    assert exact.intervals(6, [0.2] * 4 + [0.3] * 2) == ((4, 6),)
    assert exact.intervals(6, [0.2] * 4 + [0.1] * 2) == ((0, 4), (5, 6))
