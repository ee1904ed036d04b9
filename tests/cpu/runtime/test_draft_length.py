"""Draft lengths follow acceptance and costs, told by a simulated machine."""

import random
from collections import Counter

import pytest

from kvforge.runtime.speculation.draft_length import MAX_PAUSE, DraftLength

MOST = 8


def simulate(acceptance, seconds, num_steps=600, seed=0):
    """(tokens / second over plain decoding, drafts of each step) of sequences whose drafts are right at ``acceptance``;
    ``seconds(drafts of the step)`` is a step's time."""
    rng, lengths = random.Random(seed), DraftLength(MOST)
    sequences = [f"s{i}" for i in range(len(acceptance))]
    chosen, tokens, time = [], 0, 0.0
    for _ in range(num_steps):
        picked = lengths.choose(len(sequences), dict.fromkeys(sequences, MOST))
        results = {}
        for sequence, count in picked.items():
            right = 0
            while right < count and rng.random() < acceptance[int(sequence[1:])]:
                right += 1
            results[sequence] = count, right
        took = seconds(sum(picked.values())) * rng.uniform(0.95, 1.05)
        lengths.observe(len(sequences), results, not picked, took)
        chosen.append(picked)
        tokens += len(sequences) + sum(right for _, right in results.values())
        time += took
    return tokens / time * seconds(0) / len(sequences), chosen


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_right_drafts_that_cost_little_are_long(num_sequences):
    speed, chosen = simulate([0.95] * num_sequences, lambda drafts: 1.0 + 0.02 * drafts)
    assert speed > 3.0
    assert Counter(length for step in chosen[50:] for length in step.values()).most_common(1)[0][0] == MOST
    assert any(not step for step in chosen[100:]), "plain steps are measured again"


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("jump", [0.3, 0.6])
def test_drafts_that_do_not_pay_are_probes_only(rate, jump):
    speed, chosen = simulate([rate] * 4, lambda drafts: 1.0 + (jump + 0.1 * drafts if drafts else 0.0), 2000)
    assert speed > 0.95
    assert sum(bool(step) for step in chosen[200:]) < 3 * 1800 / MAX_PAUSE


def test_each_sequence_has_its_own_length():
    _, chosen = simulate([0.98, 0.05], lambda drafts: 1.0 + 0.1 * drafts)
    good, bad = (sum(step.get(name, 0) for step in chosen[100:]) for name in ("s0", "s1"))
    assert good > 10 * bad


def test_it_is_deterministic_and_forgets():
    runs = [simulate([0.7, 0.4], lambda drafts: 1.0 + 0.05 * drafts, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
    lengths = DraftLength(MOST)
    lengths.observe(1, {"a": (3, 2)}, False, None)
    for _ in range(2):
        lengths.forget("a")
    assert not lengths._rates
