"""The sampler against plain definitions: penalties, masks, log-probabilities, seeds, distribution."""

import math

import numpy as np
import pytest
import torch

from kvforge.runtime import SamplingParams
from kvforge.runtime.requests.outputs import NOTHING_LEFT
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.sampling.sampler import NOT_FINITE, sample
from kvforge.runtime.sampling.state import RequestSampling
from tests.support.rounding import logprob_error

VOCAB = 40
EOS = frozenset({2})


def make_sequence(params, prompt=(5, 6, 7), generated=(), index=0, bad_words=()):
    sequence = Sequence(
        "r", index, (0, 0, index), np.asarray(prompt, dtype=np.int32), params, 200, RequestMetrics(0, 0)
    )
    words = [tuple(w) for w in params.bad_words_ids] + list(bad_words)
    stop = EOS | frozenset(params.stop_token_ids)
    sequence.sampling = RequestSampling(params, list(prompt), VOCAB, stop, words).state(index)
    for token in generated:
        sequence.append(token)
        if sequence.sampling is not None:
            sequence.sampling.record(token)
    return sequence


def random_logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_plain_greedy_rows_have_no_state_and_take_the_maximum():
    params = SamplingParams(temperature=0.0)
    sequences = [make_sequence(params) for _ in range(5)]
    assert all(sequence.sampling is None for sequence in sequences)
    logits = random_logits(5)
    result = sample(logits, sequences)
    assert result.tokens == logits.argmax(-1).tolist() and result.logprobs == {} and result.errors == {}


def test_mixed_batch_leaves_each_row_its_own():
    logits = random_logits(4)
    greedy, top1 = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=1)
    seeded = SamplingParams(seed=11)
    together = sample(logits, [make_sequence(p) for p in (greedy, seeded, top1, seeded)]).tokens
    for row, params in enumerate((greedy, seeded, top1, seeded)):
        assert sample(logits[row : row + 1], [make_sequence(params)]).tokens == [together[row]]


def test_penalties_equal_their_definition():
    params = SamplingParams(
        temperature=0.0, logprobs=0, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.5
    )
    prompt, generated = [5, 6, 5], [9, 9, 9, 10, 6]
    for seed in range(50):
        logits = random_logits(1, seed)
        expected = logits[0].tolist()
        for token in set(prompt) | set(generated):
            expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
        for token in set(generated):
            expected[token] -= 0.7 + 0.4 * generated.count(token)
        before = logits.clone()
        result = sample(logits, [make_sequence(params, prompt, generated)])
        assert result.tokens == [int(np.argmax(expected))]
        assert torch.equal(logits, before), "the model's logits were changed"


def test_penalties_count_new_tokens():
    sequence = make_sequence(SamplingParams(temperature=0.0, frequency_penalty=100.0))
    logits = random_logits(1)
    taken = []
    for _ in range(10):
        taken += sample(logits, [sequence]).tokens
    assert taken == logits[0].topk(10).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_forbids_end_and_stop_tokens(temperature):
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=[3], seed=0)
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, 2], logits[0, 3], logits[0, 20] = 50.0, 20.0, 0.0
    assert sample(logits, [make_sequence(params)]).tokens == [20]
    assert sample(logits, [make_sequence(params, generated=[8])]).tokens == [20]
    assert sample(logits, [make_sequence(params, generated=[8, 8])]).tokens == [2]


def test_bad_words_of_one_and_several_tokens():
    params = SamplingParams(temperature=0.0, bad_words_ids=[[4], [8, 10], [8, 9, 11]])
    logits = torch.zeros(1, VOCAB)
    for token, value in ((4, 9.0), (10, 8.0), (11, 7.0), (12, 6.0)):
        logits[0, token] = value
    assert sample(logits, [make_sequence(params)]).tokens == [10]
    assert sample(logits, [make_sequence(params, generated=[8])]).tokens == [11]
    assert sample(logits, [make_sequence(params, generated=[8, 9])]).tokens == [10]
    logits[0, 10] = 0.0
    assert sample(logits, [make_sequence(params, generated=[8, 9])]).tokens == [12]
    # The prompt's end is not part of a forbidden word.
    logits[0, 10] = 8.0
    assert sample(logits, [make_sequence(params, prompt=[5, 8])]).tokens == [10]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_win_over_the_minimum_length(temperature):
    bad = {"bad_words_ids": [[i] for i in range(VOCAB) if i != 2], "temperature": temperature, "seed": 0}
    logits = random_logits(1)
    assert sample(logits, [make_sequence(SamplingParams(**bad, min_tokens=5))]).tokens == [2]
    bad["bad_words_ids"].remove([9])
    assert sample(logits, [make_sequence(SamplingParams(**bad, min_tokens=5))]).tokens == [9]


def test_a_row_whose_every_token_is_forbidden_fails_alone():
    params = SamplingParams(bad_words_ids=[[8, i] for i in range(VOCAB)], temperature=0.0)
    logits = random_logits(2)
    result = sample(logits, [make_sequence(params, generated=[8]), make_sequence(params, generated=[9])])
    assert list(result.errors) == [0] and result.errors[0] == NOTHING_LEFT
    assert result.tokens[1] == int(logits[1].argmax())


def test_a_row_whose_state_is_broken_fails_alone(caplog):
    params = [SamplingParams(seed=i, frequency_penalty=0.5, logprobs=1) for i in range(3)]
    logits = random_logits(3)
    alone = [sample(logits[i : i + 1], [make_sequence(params[i])]).tokens[0] for i in (0, 2)]
    sequences = [make_sequence(p) for p in params]
    sequences[1].sampling.counts = sequences[1].sampling.counts[:3]
    result = sample(logits, sequences)
    assert list(result.errors) == [1] and [result.tokens[0], result.tokens[2]] == alone
    assert set(result.logprobs) == {0, 2}


@pytest.mark.parametrize("values", [[math.nan], [math.inf], [-math.inf] * VOCAB, [math.nan] * VOCAB])
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 3, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"temperature": 0.0, "bad_words_ids": [[0]]},
    ],
)
def test_rows_that_are_not_finite_fail_alone(values, changes):
    logits = random_logits(3)
    params = SamplingParams(**changes)
    alone = [sample(logits[i : i + 1], [make_sequence(params)]).tokens[0] for i in (0, 2)]
    logits[1, : len(values)] = torch.tensor(values)
    result = sample(logits, [make_sequence(params) for _ in range(3)])
    assert result.errors == {1: NOT_FINITE}
    assert [result.tokens[0], result.tokens[2]] == alone and 1 not in result.logprobs


def test_single_impossible_tokens_are_no_error():
    logits = random_logits(1)
    logits[0, 3] = -math.inf
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1, logprobs=1)):
        assert sample(logits, [make_sequence(params)]).errors == {}


def test_the_smallest_top_p_takes_the_most_probable_token():
    logits = random_logits(1)
    for seed in range(5):
        sequence = make_sequence(SamplingParams(top_p=5e-324, seed=seed))
        assert sample(logits, [sequence]).tokens == [int(logits.argmax())]


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 1e4},
        {"frequency_penalty": -1e4},
        {"repetition_penalty": 1e3},
        {"repetition_penalty": 1e-3},
        {"temperature": 1e4},
        {"temperature": 5e-324},
        {"min_p": 5e-324},
        {"min_p": 1.0},
        {"top_k": 2**31 - 1},
    ],
)
def test_the_limits_of_the_parameters_can_be_sampled(changes):
    sequence = make_sequence(SamplingParams(seed=1, **changes), generated=[5, 5, 9])
    result = sample(random_logits(1), [sequence])
    assert result.errors == {} and 0 <= result.tokens[0] < VOCAB


def test_logprobs_are_of_the_models_distribution():
    params = [
        SamplingParams(seed=1, temperature=0.5, top_k=2, logprobs=3, repetition_penalty=2.0),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    logits = random_logits(3, seed=4)
    result = sample(logits, [make_sequence(p) for p in params])
    assert set(result.logprobs) == {0, 2}
    for row, entry in result.logprobs.items():
        values = logits[row].double().tolist()
        log_total = math.log(sum(math.exp(v) for v in values))
        exact = {token: value - log_total for token, value in enumerate(values)}
        order = sorted(exact, key=lambda token: -exact[token])
        assert entry.token_id == result.tokens[row]
        rounding = logprob_error(len(values), max(map(abs, values)))
        assert entry.logprob == pytest.approx(exact[entry.token_id], abs=rounding)
        assert entry.rank == order.index(entry.token_id) + 1
        assert list(entry.top) == order[: params[row].logprobs]
        for token, value in entry.top.items():
            assert value == pytest.approx(exact[token], abs=rounding)


def test_seeds_repeat_and_differ():
    logits = random_logits(1)

    def draws(seed, index=0):
        sequence = make_sequence(SamplingParams(seed=seed), index=index)
        return [sample(logits, [sequence]).tokens[0] for _ in range(20)]

    assert draws(7) == draws(7) and draws(7) != draws(8) and draws(None) != draws(None)
    assert draws(7, index=1) == draws(8, index=0), "sequence i of a request has seed + i"


def test_drawn_frequencies_pass_a_chi_square_test():
    logits = random_logits(1, seed=2)[:, :12]
    sequence = make_sequence(SamplingParams(seed=5, temperature=1.2, top_k=6))
    probs = (logits[0] / 1.2).double().softmax(-1)
    top = probs.topk(6)
    expected = dict(zip(top.indices.tolist(), (top.values / top.values.sum()).tolist(), strict=True))
    num_draws, counts = 3000, dict.fromkeys(expected, 0)
    for _ in range(num_draws):
        counts[sample(logits, [sequence]).tokens[0]] += 1
    statistic = sum((counts[t] - num_draws * p) ** 2 / (num_draws * p) for t, p in expected.items())
    assert statistic < 20.5, "above the 99.9% quantile of chi-square with 5 degrees of freedom"
