"""Drafting lives on what it gains and on a small share of the time without it."""

import random

import pytest

from kvforge.runtime.speculation.balance import ENOUGH, FIRST, LEAST, MOST, SHARE, Balance


def run(balance, gain, num_steps):
    """(steps with drafting, steps that it gained) where each is worth ``gain()``."""
    tried, gained = 0, 0.0
    for _ in range(num_steps):
        if balance.is_open:
            worth = gain()
            balance.add_drafting(worth)
            tried, gained = tried + 1, gained + worth
        else:
            balance.add_plain()
    return tried, gained


@pytest.mark.parametrize("loss", [0.02, 0.1, 0.3, 0.6])
def test_no_more_is_lost_than_the_share_and_what_there_was_at_first(loss):
    rng, num_steps = random.Random(0), 5000
    tried, gained = run(Balance(), lambda: rng.uniform(-2 * loss, 0.0), num_steps)
    assert 0 < tried < 0.6 * num_steps
    assert gained >= -(SHARE * num_steps + FIRST + 2 * loss)


def test_what_gains_is_never_stopped():
    assert run(Balance(), lambda: 0.1, 1000)[0] == 1000


def test_old_gains_do_not_pay_for_long_and_the_longest_stop_is_short():
    balance = Balance()
    run(balance, lambda: 3.0, 100)
    for _ in range(int(MOST / 0.5)):
        assert balance.is_open
        balance.add_drafting(-0.5)
    assert not balance.is_open
    balance.add_drafting(-1000.0)
    assert not balance.is_open
    num_plain = 0
    while not balance.is_open:
        balance.add_plain()
        num_plain += 1
    assert num_plain <= (ENOUGH - LEAST) / SHARE + 2
