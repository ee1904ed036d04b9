"""Parameters at the ends of their ranges against the definition in float64, as given and as float32 on the way."""

import itertools
import math

import numpy as np
import pytest
import torch

from kvforge.runtime import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.sampling.sampler import sample
from kvforge.runtime.sampling.state import RequestSampling
from kvforge.serving.contract.sampling import sampling_fields

VOCAB = 300
TINY = [1e-50, 5e-324, 1e-45, 1e-30, 1e-9]
LOGITS = torch.from_numpy(np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32) * 2)


def make_sequence(params, index=0):
    sequence = Sequence("r", index, (0, 0, index), np.asarray([5], dtype=np.int32), params, 200, RequestMetrics(0, 0))
    sequence.sampling = RequestSampling(params, [5], VOCAB, frozenset({2}), []).state(index)
    return sequence


def drawn(params, num_draws=64):
    """The tokens that so many sequences draw."""
    return set(sample(LOGITS.repeat(num_draws, 1), [make_sequence(params, index) for index in range(num_draws)]).tokens)


def possible(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that the definition leaves, in float64."""
    with np.errstate(over="ignore"):
        scaled = (LOGITS.double().numpy() - float(LOGITS.max())) / temperature
    weights = np.exp(scaled)
    order = [i for i in np.argsort(-weights) if weights[i] >= min_p * weights.max()][: top_k or VOCAB]
    mass = np.cumsum(weights[order])
    count = int(np.searchsorted(mass, top_p * mass[-1])) + 1
    return set(order[:count])


@pytest.mark.parametrize("top_k", [0, 5, VOCAB])
@pytest.mark.parametrize("tiny", TINY)
def test_a_tiny_top_p_leaves_the_most_probable_token(tiny, top_k):
    params = SamplingParams(top_p=tiny, top_k=top_k, seed=0)
    assert possible(top_p=tiny, top_k=top_k) == {int(LOGITS.argmax())} == drawn(params)
    assert np.float32(params.top_p) > 0, "it stays above 0 on its way to the engine, where 0 is off"
    decayed = SamplingParams(top_p=0.9, top_p_decay=tiny, top_p_min=tiny, seed=0)
    sequence = make_sequence(decayed)
    sample(LOGITS[None], [sequence])
    assert all(sample(LOGITS[None], [sequence]).tokens == [int(LOGITS.argmax())] for _ in range(30))


@pytest.mark.parametrize("tiny", TINY)
def test_a_tiny_temperature_is_greedy(tiny):
    for value in (tiny, float(np.float32(tiny))):
        params = SamplingParams(temperature=value, seed=0)
        assert params.greedy and drawn(params) == {int(LOGITS.argmax())} == possible(temperature=tiny)
    assert not SamplingParams(temperature=1e-6).greedy


@pytest.mark.parametrize(
    "changes",
    [
        {"min_p": 1e-50},
        {"min_p": 1e-45},
        {"min_p": 1.0},
        {"min_p": 1.0, "top_k": 7},
        {"top_p": 1 - 1e-12},
        {"top_p": math.nextafter(1.0, 0.0), "top_k": 3},
        {"top_k": 2**31 - 1, "top_p": 0.3},
        {"temperature": 1e4, "top_k": 3},
        {"temperature": 1e-6},
        {"temperature": 1e4, "top_p": 1e-50},
        {"temperature": 1e4, "min_p": 1e-50, "top_p": 0.01},
    ],
)
def test_what_is_drawn_is_what_the_definition_leaves(changes):
    left = possible(**changes)
    seen = drawn(SamplingParams(seed=0, **changes), 400)
    assert seen <= left and (len(left) > 10 or seen == left)


@pytest.mark.parametrize("penalty", [1e-3, 1e3])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_penalties_leave_a_token(penalty, scale):
    """Bias and penalties at their ends together: no infinity, so that no sequence is refused a token."""
    for bias, other in itertools.product((1e30, -1e30), (1e4, -1e4)):
        params = SamplingParams(
            temperature=1e-5,
            seed=0,
            repetition_penalty=penalty,
            presence_penalty=other,
            frequency_penalty=other,
            logit_bias={token: bias for token in range(VOCAB)},
        )
        sequence = make_sequence(params)
        for _ in range(3):
            result = sample((LOGITS * scale)[None], [sequence])
            assert not result.errors and 0 <= result.tokens[0] < VOCAB


def test_a_bias_at_its_end_is_the_same_after_float32():
    for value in (1e30, -1e30):
        (sent,) = SamplingParams(logit_bias={3: value}).logit_bias.values()
        (arrived,) = SamplingParams(logit_bias={3: float(np.float32(sent))}).logit_bias.values()
        assert np.float32(arrived) == np.float32(value)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 2**64 - 1])
def test_the_last_seeds_are_seeds(seed):
    params = SamplingParams(seed=seed, n=3)
    tokens = [sample(LOGITS[None], [make_sequence(params, index)]).tokens for index in range(3)]
    assert tokens == [sample(LOGITS[None], [make_sequence(params, index)]).tokens for index in range(3)]
    same = SamplingParams(seed=seed % 2**64)
    assert sample(LOGITS[None], [make_sequence(same, 2)]).tokens == tokens[2]


@pytest.mark.parametrize("tiny", TINY)
def test_what_the_gateway_sends_is_what_was_asked(tiny):
    """As kvforge.gateway.engine.tensors sends them: as float32."""
    asked = SamplingParams(top_p=tiny, top_k=5, min_p=tiny, max_tokens=4, seed=3)
    tensors = {
        "request_output_len": np.array([[4]], np.int32),
        "temperature": np.array([[asked.temperature]], np.float32),
        "runtime_top_p": np.array([[asked.top_p]], np.float32),
        "runtime_top_k": np.array([[asked.top_k]], np.int32),
        "min_p": np.array([[asked.min_p]], np.float32),
        "seed": np.array([[3]], np.uint64),
    }
    arrived = SamplingParams(**sampling_fields(tensors, 0))
    assert drawn(arrived) == drawn(asked) == {int(LOGITS.argmax())}
