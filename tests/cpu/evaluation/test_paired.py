"""The paired comparison against worked examples and by simulation."""

import random

import pytest

from kvforge.evaluation.paired import paired_difference

PRINTED = 5e-5
"""Half a unit of the fourth digit, with which the interval is given."""
NARROW = 1 / 200


def test_counts_and_exact_p_value() -> None:
    """10 gained and 2 lost of 100: p = 2 * (1 + 12 + 66) / 2^12."""
    first = [False] * 10 + [True] * 2 + [True] * 50 + [False] * 38
    second = [True] * 10 + [False] * 2 + [True] * 50 + [False] * 38
    result = paired_difference(first, second)
    assert (result.num_prompts, result.gained, result.lost, result.difference) == (100, 10, 2, 0.08)
    assert result.p_value == pytest.approx(2 * (1 + 12 + 66) / 2**12)
    assert result.low == pytest.approx(0.0108, abs=PRINTED) and result.high == pytest.approx(0.1460, abs=PRINTED)


def test_nothing_differs() -> None:
    result = paired_difference([True] * 500, [True] * 500)
    assert result.difference == 0 and result.p_value == 1 and -NARROW < result.low < 0 < result.high < NARROW


@pytest.mark.parametrize("lengths", [(0, 0), (2, 3)])
def test_unequal_or_no_prompts_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="same prompts"):
        paired_difference([True] * lengths[0], [True] * lengths[1])


def test_the_interval_covers_at_its_level() -> None:
    """True difference 0.03 - 0.01 over 300 prompts: about 95 of 100 intervals hold it, and swapping mirrors it."""
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        draws = [rng.random() for _ in range(300)]
        first = [u >= 0.03 for u in draws]
        second = [not 3 <= 100 * u < 4 for u in draws]
        result = paired_difference(first, second)
        covered += result.low <= 2 / 100 <= result.high
        mirrored = paired_difference(second, first)
        assert (mirrored.low, mirrored.high) == (-result.high, -result.low)
    assert 370 <= covered <= 396


def test_the_interval_stays_within_the_possible() -> None:
    result = paired_difference([False], [True])
    assert (result.difference, result.high) == (1.0, 1.0) and -1 < result.low < 1
    assert paired_difference([True], [False]).low == -1.0
