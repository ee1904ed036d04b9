"""Draft lengths follow acceptance and costs, told by a simulated machine."""

import random
from collections import Counter

import pytest

from kvforge.runtime.speculation.draft_length import GROWTH, PLAIN_PERIOD, PROBE, DraftLength

MOST = 8


def simulate(acceptance, seconds, num_steps=600, seed=0):
    """(tokens / second over plain decoding, drafts of each step) of sequences whose drafts are right at ``acceptance``;
    ``seconds(drafts of the step)`` is a step's time."""
    rng, lengths = random.Random(seed), DraftLength(MOST)
    sequences = [f"s{i}" for i in range(len(acceptance))]
    chosen, tokens, time = [], 0, 0.0
    for _ in range(num_steps):
        was_tried = lengths.is_due(len(sequences))
        picked = lengths.choose(len(sequences), dict.fromkeys(sequences, MOST)) if was_tried else {}
        results = {}
        for sequence, count in picked.items():
            right = 0
            while right < count and rng.random() < acceptance[int(sequence[1:])]:
                right += 1
            results[sequence] = count, right
        took = seconds(sum(picked.values())) * rng.uniform(0.95, 1.05)
        lengths.observe(len(sequences), results, was_tried, took)
        chosen.append(picked)
        tokens += len(sequences) + sum(right for _, right in results.values())
        time += took
    return tokens / time * seconds(0) / len(sequences), chosen


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_right_drafts_that_cost_little_are_long(num_sequences):
    speed, chosen = simulate([0.95] * num_sequences, lambda drafts: 1.0 + 0.02 * drafts)
    assert speed > 3.0
    assert Counter(length for step in chosen[50:] for length in step.values()).most_common(1)[0][0] == MOST
    assert any(not step for step in chosen[-PLAIN_PERIOD - 5 :]), "plain steps are measured again"


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("jump", [0.3, 0.6])
def test_drafts_that_do_not_pay_are_probes_only(rate, jump):
    speed, chosen = simulate([rate] * 4, lambda drafts: 1.0 + (jump + 0.1 * drafts if drafts else 0.0), 2000)
    assert speed > 0.97
    assert 0 < sum(bool(step) for step in chosen[200:]) < 1800 / 4


@pytest.mark.parametrize("acceptance", [0.0, 0.95])
def test_no_step_has_far_more_drafts_than_one_before(acceptance):
    """Where drafts cost more than is guessed, a short run loses little."""
    speed, chosen = simulate([acceptance] * 8, lambda drafts: 1.0 + 0.12 * drafts, 200)
    counts = [sum(step.values()) for step in chosen]
    assert counts[0] == 0 < max(counts) and speed > 0.985
    for index, count in enumerate(counts):
        assert count <= max(PROBE, GROWTH * max(counts[:index], default=0))


@pytest.mark.parametrize("found", [0.0, 0.5])
def test_looking_for_drafts_counts_even_where_there_are_none(found):
    """Half of a drafted step's tokens are right, which is as good as none; looking costs a tenth of a step."""
    rng, lengths, num_tried = random.Random(0), DraftLength(MOST), 0
    for _ in range(2000):
        picked, was_tried = {}, lengths.is_due(8)
        if was_tried:
            picked = lengths.choose(8, {f"s{i}": MOST for i in range(8) if rng.random() < found})
        results = {name: (count, min(count, 1) if rng.random() < 0.5 else 0) for name, count in picked.items()}
        lengths.observe(8, results, was_tried, 1.0 + 0.1 * was_tried + 0.07 * sum(picked.values()))
        num_tried += was_tried
    assert 0 < num_tried < 2000 / 4


@pytest.mark.parametrize(("num_right", "pays"), [(0, False), (2, True)])
def test_looking_for_drafts_counts_beside_prompts_and_so_do_those_that_are_right(num_right, pays):
    """Looking costs a tenth of a step; two of 8 sequences gain a token, or none. Of ten steps nine have prompts."""
    lengths, num_tried = DraftLength(MOST), 0
    for step in range(2000):
        was_tried = lengths.is_due(8)
        num_tried += was_tried
        if step % 10:
            if was_tried:
                lengths.add_beside_prompts(8, 2, num_right, 0.1)
            lengths.observe(8, {}, was_tried, None)
        else:
            lengths.observe(8, {}, was_tried, 1.1 if was_tried else 1.0)
    assert num_tried > 1500 if pays else 0 < num_tried < 2000 / 4


def test_a_loss_at_one_number_of_sequences_is_none_at_another():
    lengths = DraftLength(MOST)
    for number, seconds in ((8, 30.0), (1, 1.1)):
        for _ in range(200):
            was_tried = lengths.is_due(number)
            picked = lengths.choose(number, dict.fromkeys(range(number), MOST)) if was_tried else {}
            results = {name: (count, count) for name, count in picked.items()}
            lengths.observe(number, results, was_tried, seconds if picked else 1.0)
        assert bool(picked) == (number == 1)


@pytest.mark.parametrize("numbers", [range(1, 41), range(40, 0, -1)])
def test_what_may_be_lost_at_first_is_lost_once_and_not_at_each_number(numbers):
    """Drafts are never right, and looking for them costs a fifth of a step; numbers change as in a short run."""
    lengths, lost = DraftLength(MOST), 0.0
    for number in numbers:
        for _ in range(8):
            was_tried = lengths.is_due(number)
            picked = lengths.choose(number, dict.fromkeys(range(number), MOST)) if was_tried else {}
            took = 1.0 + 0.2 * was_tried + 0.02 * sum(picked.values())
            lengths.observe(number, {one: (count, 0) for one, count in picked.items()}, was_tried, took)
            lost += took - 1.0
    assert 0.5 < lost < 6  # of 320 plain steps


def test_each_sequence_has_its_own_length():
    _, chosen = simulate([0.98, 0.05], lambda drafts: 1.0 + 0.1 * drafts)
    good, bad = (sum(step.get(name, 0) for step in chosen[100:]) for name in ("s0", "s1"))
    assert good > 10 * bad


def test_chances_of_a_drafts_own_decide_in_place_of_what_was_right_before():
    lengths = DraftLength(MOST)
    for _ in range(50):  # nothing was right, a draft costs half a plain step
        is_drafted = lengths.is_due(1)
        lengths.observe(1, {"a": (2, 0)} if is_drafted else {}, is_drafted, 2.0 if is_drafted else 1.0)
    lengths._cost(1)[1].is_open = True
    own = (0.9, 0.9, 0.9, 0.1, 0.9)
    assert lengths.choose(1, {"a": 5}, {"a": own}) == {"a": 3}
    assert lengths.choose(1, {"a": 5}, {"a": (0.51, 0.9, 0.9)}) == {"a": 1}
    assert lengths.choose(1, {"a": 5}, {"a": (0.49, 0.9, 0.9)}) == {}


@pytest.mark.parametrize(("first", "each", "right", "pays"), [(0.5, 0.01, 0.9, True), (0.0, 0.12, 0.0, False)])
def test_many_drafts_are_found_to_pay_where_few_do_not(first, each, right, pays):
    """What a step's first draft costs and what each one does, in plain steps; looking costs a fifth. Where each costs
    much, a trial that fails is a small one."""
    lengths, rng, counts, lost = DraftLength(MOST), random.Random(0), [], 0.0
    for _ in range(1000):
        picked, was_tried = {}, lengths.is_due(32)
        if was_tried:
            own = {f"s{i}": (0.9,) * 4 for i in range(32)}
            picked = lengths.choose(32, dict.fromkeys(own, 4), own)
        results = {}
        for name, count in picked.items():
            wrong = (place for place in range(count) if rng.random() >= right)
            results[name] = count, next(wrong, count)
        counts.append(sum(picked.values()))
        took = 1.0 + 0.2 * was_tried + first * bool(picked) + each * counts[-1]
        lengths.observe(32, results, was_tried, took)
        lost += took - 1.0
    assert (sum(count > 100 for count in counts) > 500) == pays
    assert pays or (max(counts) < 20 and lost < 15)


def test_it_is_deterministic_and_forgets():
    runs = [simulate([0.7, 0.4], lambda drafts: 1.0 + 0.05 * drafts, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
    lengths = DraftLength(MOST)
    lengths.observe(1, {"a": (3, 2)}, True, None)
    for _ in range(2):
        lengths.forget("a")
    assert not lengths._rates
