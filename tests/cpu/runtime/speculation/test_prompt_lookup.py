"""Prompt lookup finds what a search of the whole sequence finds."""

import itertools
import random

import numpy as np
import pytest

from kvforge.runtime import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.prompt_lookup import MAX_CANDIDATES, MAX_REST, NgramIndex, PromptLookup


def searched(tokens, length, least, most):
    """The place by definition: longest run first, of its occurrences the newest; among the newest places of ``least``
    tokens only."""
    text = tokens[:length].tolist()
    ends = [e for e in range(length - 1, least - 1, -1) if text[e - least : e] == text[length - least : length]]
    for size in range(min(most, length - 1), least - 1, -1):
        for end in ends[:MAX_CANDIDATES]:
            if end >= size and text[end - size : end] == text[length - size : length]:
                return end
    return -1


@pytest.mark.parametrize("vocab", [2, 6, 300])
def test_it_finds_what_a_search_finds(vocab):
    num_found = 0
    for seed in range(60):
        rng = random.Random(seed)
        least = rng.randint(1, 4)
        most = least + rng.randint(0, 3)
        tokens = np.zeros(rng.randint(2, 160), dtype=np.int32)
        index, length = NgramIndex(tokens, least, most), 0
        for _ in range(14):
            if rng.random() < 0.1 and length:
                length = rng.randint(0, length - 1)  # cut off, and other tokens follow
                index.extend(length)
            step = rng.choice([1, 1, 2, 5, 50])
            start, length = length, min(length + step, len(tokens))
            tokens[start:length] = [rng.randrange(vocab) for _ in range(start, length)]
            if vocab == 300 and rng.random() < 0.5 and length > 20:
                tokens[length - 6 : length] = tokens[3:9]
                index = NgramIndex(tokens, least, most)
            index.extend(length)
            place = searched(tokens, length, least, most)
            found = index.longest(length)
            if vocab == 2 and found != place:  # chains are longer than what is looked at
                assert length > MAX_CANDIDATES
                continue
            assert found == place, (seed, length)
            num_found += place >= 0
    assert num_found > 100


def sequence_of(tokens, max_length=64):
    metrics = RequestMetrics(0, 0)
    return Sequence("a", 0, (0, 0, 0), np.asarray(tokens, dtype=np.int32), SamplingParams(), max_length, metrics)


@pytest.mark.parametrize(
    ("tokens", "count", "drafted"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 3, (3, 4, 9)),
        ([1, 2, 3, 7, 1, 2, 4, 7, 1, 2], 2, (4, 7)),  # the newest of equals
        ([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], 1, (3,)),  # the longest before the newest
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 7, (1, 2, 3, 1, 2, 3, 1)),  # a loop goes on
        ([1, 2, 3, 4, 5], 4, ()),
        ([8], 4, ()),
        ([8, 8], 4, ()),
        ([8, 8, 8], 4, (8, 8, 8, 8)),
    ],
)
def test_drafts(tokens, count, drafted):
    lookup = PromptLookup(SpeculativeConfig("ngram"))
    sequence = sequence_of(tokens)
    for _ in range(2):
        assert lookup.draft([sequence], [count])[0].token_ids == drafted
        lookup.forget(sequence)
        lookup.forget(sequence)


def test_lookups_that_keep_failing_become_rarer_until_one_succeeds():
    lookup = PromptLookup(SpeculativeConfig("ngram"))
    sequence, looked_up = sequence_of(range(100), 1000), []
    for token in range(100, 400):
        sequence.append(token)
        assert lookup.draft([sequence], [4])[0].token_ids == ()
        if lookup._indices[sequence]._end == sequence.length:
            looked_up.append(token)
    pauses = [b - a for a, b in itertools.pairwise(looked_up)]
    assert pauses[:3] == [1, 1, 1] and pauses == sorted(pauses) and pauses[-1] == MAX_REST + 1
    num_steps = 0
    while not (draft := lookup.draft([sequence], [4])[0].token_ids):
        num_steps += 1
        sequence.append(num_steps)
    assert num_steps <= MAX_REST + 3 and draft[0] == num_steps + 1
    sequence.append(draft[0])
    assert lookup.draft([sequence], [4])[0].token_ids


def test_it_keeps_up_with_generated_tokens_and_keeps_little():
    lookup = PromptLookup(SpeculativeConfig("ngram", prompt_lookup_min=1, prompt_lookup_max=3))
    rng = random.Random(3)
    sequence = sequence_of([rng.randrange(40) for _ in range(500)], 1000)
    for _ in range(400):
        expected = searched(sequence.tokens, sequence.length, 1, 3)
        assert lookup.draft([sequence], [2])[0].token_ids[:1] == tuple(
            sequence.tokens[expected : expected + 1].tolist()
        )
        sequence.append(rng.randrange(40))
    index = lookup._indices[sequence]
    assert index._newest.nbytes + index._older.nbytes <= 20 * 1000
