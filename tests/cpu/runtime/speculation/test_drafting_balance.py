"""Drafting lives on what it gains and on a small share of the time without it."""

import random

import pytest

from kvforge.runtime.speculation import prompt_credit
from kvforge.runtime.speculation.balance import ENOUGH, FIRST, HALVINGS, MAX_STEPS, MIN_STEPS, PATIENCE, SHARE, Balance
from kvforge.runtime.speculation.prompt_credit import PromptCredit


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


def test_what_keeps_failing_is_tried_ever_more_seldom_until_an_attempt_gains():
    balance, waits = Balance(), []
    for _ in range(PATIENCE + HALVINGS + 3):
        while balance.is_open:
            balance.add_drafting(-0.5)
        waits.append(balance.num_closed)
        balance.add_plain(balance.num_closed)
    assert waits[1] == waits[PATIENCE - 1] < waits[PATIENCE] and waits[-1] == waits[-2]
    assert 2**HALVINGS * (waits[1] - 1) < waits[-1] <= 2**HALVINGS * waits[1]  # waits are rounded up
    balance.add_drafting(0.1)  # one step that gains, of an attempt that does not
    balance.add_drafting(-0.6)
    assert balance.num_closed >= waits[-1]
    balance.add_plain(balance.num_closed)
    balance.add_drafting(FIRST)
    balance.add_drafting(-1.25)
    assert balance.num_closed < waits[-1] / 2


def test_what_follows_another_has_no_more_than_it_has_and_is_closed_where_it_is():
    for gained, is_open, steps in ((3.0, True, FIRST), (0.125 - FIRST, True, 0.125), (-3.0, False, 0.0)):
        other, balance = Balance(), Balance()
        other.add_drafting(gained)
        balance.follow(other)
        assert (balance.is_open, balance.add_drafting(MAX_STEPS)) == (is_open, steps)


def test_what_gains_is_never_stopped():
    assert run(Balance(), lambda: 0.1, 1000)[0] == 1000


def test_old_gains_do_not_pay_for_long_and_the_longest_stop_is_short():
    balance = Balance()
    run(balance, lambda: 3.0, 100)
    for _ in range(int(MAX_STEPS / 0.5)):
        assert balance.is_open
        balance.add_drafting(-0.5)
    assert not balance.is_open
    balance.add_drafting(-1000.0)
    assert not balance.is_open
    num_plain, said = 0, balance.num_closed
    while not balance.is_open:
        assert abs(balance.num_closed - (said - num_plain)) <= 1
        balance.add_plain()
        num_plain += 1
    assert num_plain <= (ENOUGH - MIN_STEPS) / SHARE + 2 and balance.num_closed == 0


def test_what_a_balance_does_not_keep():
    balance = Balance()
    assert balance.add_drafting(MAX_STEPS - FIRST) == 0.0
    assert balance.add_drafting(0.75) == 0.75
    assert balance.add_drafting(-1.0) == 0.0 and balance.add_drafting(1.5) == 0.5


@pytest.mark.parametrize("share_of_prompts", [0.01, 0.05, 0.3])
def test_where_drafting_gains_nothing_entries_of_prompts_take_their_share(share_of_prompts):
    """And at first one step's."""
    credit, spent, plain = PromptCredit(), 0.0, 0.0
    for step in range(20000):
        if step % 10 == 0 and credit.is_open:
            credit.spend(share_of_prompts * 10)
            spent += share_of_prompts * 10
        credit.add_plain(1.0)
        plain += 1.0
    assert 10 * share_of_prompts < spent <= 2 * prompt_credit.SHARE * plain + 10 * share_of_prompts


def test_entries_of_prompts_that_drafting_pays_for_are_always_made_and_not_for_long_behind_that():
    credit = PromptCredit()
    for _ in range(100):
        assert credit.is_open
        credit.spend(2.0)
        credit.gain(5.0)
    count = 0
    while credit.is_open:
        credit.spend(2.0)
        count += 1
    assert 0 < count < 20
