"""The drawn distribution is the one that the filters' definitions give."""

import math
import random

import numpy as np
import pytest
import torch

from kvforge.runtime import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.sampling.draw import draw_tokens
from kvforge.runtime.sampling.filters import Filters
from kvforge.runtime.sampling.on_device import choose, draws_of
from kvforge.runtime.sampling.sampler import sample
from kvforge.runtime.sampling.state import RequestSampling


def reference_distribution(logits, temperature, top_k, top_p, min_p):
    """min_p, then top_k, then top_p on what is left, in plain Python on one row."""
    scaled = [x / temperature for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    order = [i for i in order if weights[i] >= min_p * max(weights)][:top_k]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i]
        if mass >= top_p * total:
            break
    return {i: weights[i] / mass for i in kept}


def counts_over_grid(logits, temperature, top_k, top_p, min_p, num_draws):
    """How often each token is drawn when the uniform number runs over an even grid."""
    rows = torch.tensor(logits, dtype=torch.float32).expand(num_draws, -1)
    column = torch.ones(num_draws)
    tokens = draw_tokens(
        rows,
        Filters(column * temperature, torch.full((num_draws,), top_k), column * top_p, column * min_p),
        (torch.arange(num_draws) + 0.5) / num_draws,
    )
    return np.bincount(tokens.numpy(), minlength=len(logits))


CASES = [
    (1.0, None, 1.0, 0.0),
    (0.5, None, 1.0, 0.0),
    (2.0, 5, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, None, 0.7, 0.0),
    (1.0, None, 0.05, 0.0),
    (1.0, 7, 0.6, 0.0),
    (1.0, None, 1.0, 0.2),
    (1.3, 9, 0.9, 0.05),
    (0.8, None, 0.8, 0.1),
    (1.0, None, 0.999, 0.0),
]


@pytest.mark.parametrize("vocab_size", [11, 600])
@pytest.mark.parametrize("temperature, top_k, top_p, min_p", CASES)
def test_grid_counts_are_the_distribution(vocab_size, temperature, top_k, top_p, min_p, one_thread):
    logits = np.random.default_rng(vocab_size).standard_normal(vocab_size) * 2
    top_k = top_k or vocab_size
    expected = reference_distribution(logits.tolist(), temperature, top_k, top_p, min_p)
    num_draws = 5000
    counts = counts_over_grid(logits, temperature, top_k, top_p, min_p, num_draws)
    for token in range(vocab_size):
        # Inverting the cumulative distribution on a grid is off by at most one draw at each end.
        assert abs(counts[token] - num_draws * expected.get(token, 0.0)) <= 2, token
        assert token in expected or counts[token] == 0


@pytest.mark.parametrize("top_p, min_p", [(0.5, 0.0), (0.95, 0.0), (0.9, 0.001), (0.9999, 0.0)])
def test_flat_nucleus_beyond_the_first_candidates(top_p, min_p, one_thread):
    """Nearly equal probabilities: the nucleus holds thousands of tokens, so more candidates must be looked at."""
    logits = np.random.default_rng(0).standard_normal(5000) * 0.01
    size = len(reference_distribution(logits.tolist(), 1.0, 5000, top_p, min_p))
    counts = counts_over_grid(logits, 1.0, 5000, top_p, min_p, 4000)
    rank = np.argsort(np.argsort(-logits))
    drawn_ranks = rank[np.nonzero(counts)[0]]
    assert size > 2000
    assert size - 5 <= drawn_ranks.max() < size + 2, "the least probable token of the nucleus"
    assert len(drawn_ranks) > 0.9 * min(4000, size)


def test_rows_do_not_influence_each_other(one_thread):
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((40, 700)).astype(np.float32) * 3)
    temperature = torch.from_numpy(rng.uniform(0.3, 2, 40).astype(np.float32))
    top_k = torch.from_numpy(rng.choice([700, 700, 1, 3, 50, 400], 40))
    top_p = torch.from_numpy(rng.choice([1.0, 0.5, 0.9], 40).astype(np.float32))
    min_p = torch.from_numpy(rng.choice([0.0, 0.1], 40).astype(np.float32))
    uniform = torch.from_numpy(rng.uniform(0, 1, 40).astype(np.float32))
    filters = Filters(temperature, top_k, top_p, min_p)
    together = draw_tokens(logits, filters, uniform)
    for row in range(40):
        one = [row]
        alone = draw_tokens(logits[one], filters.rows(one), uniform[one])
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_impossible_tokens_are_never_drawn(uniform, one_thread):
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 4] = 3.0
    one = torch.ones(1)
    for top_p in (1.0, 0.5):
        token = draw_tokens(logits, Filters(one, torch.tensor([9]), one * top_p, one * 0), one * uniform)
        assert token.item() == 4


def test_tiny_temperature_is_greedy(one_thread):
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * 100
    column = torch.ones(8)
    tokens = draw_tokens(logits, Filters(column * 1e-6, torch.full((8,), 50), column, column * 0), column * 0.7)
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("vocab_size", [11, 600, 5000])
def test_what_is_queued_chooses_what_the_sampler_does(vocab_size, one_thread):
    """Also at ties, beyond the first candidates, and where logits are not finite."""
    rng = random.Random(vocab_size)
    for seed in range(12):
        logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.01, 1, 5])
        logits = (logits * 4).round() / 4 if rng.random() < 0.4 else logits
        logits[3, 5], logits[4, 7] = math.nan, math.inf
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
                top_k=rng.choice([0, 0, 1, 5, vocab_size // 2]),
                top_p=rng.choice([1.0, 1.0, 0.9, 0.999]),
                min_p=rng.choice([0.0, 0.0, 0.1]),
                seed=rng.randrange(99),
            )
            for _ in range(16)
        ]

        def sequences(params=params):
            made = [Sequence("r", 0, (0, 0, 0), np.array([1]), one, 9, RequestMetrics(0, 0)) for one in params]
            for one in made:
                one.sampling = RequestSampling(one.params, [1], vocab_size, frozenset(), []).state(0)
            return made

        expected = sample(logits, sequences())
        got = choose(logits, draws_of(sequences(), vocab_size, lambda tensor: tensor)).tolist()
        assert list(expected.errors) == [3, 4]
        assert got == [-1 if row in expected.errors else token for row, token in enumerate(expected.tokens)]
