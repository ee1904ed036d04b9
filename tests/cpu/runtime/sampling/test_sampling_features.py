"""Logit bias, top-p decay and generation logits against plain definitions, and all of them together."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from kvforge.common.errors import RequestError
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.requests.outputs import NOTHING_LEFT
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.sampling.sampler import sample
from kvforge.runtime.sampling.state import RequestSampling
from tests.support.sessions.fake import FakeSession, context_logits

VOCAB = 40
EOS = frozenset({2})
PROMPT = [5, 6, 5]


def make_sequence(params, generated=()):
    sequence = Sequence("r", 0, (0, 0, 0), np.asarray(PROMPT, dtype=np.int32), params, 200, RequestMetrics(0, 0))
    words = [tuple(w) for w in params.bad_words_ids]
    sequence.sampling = RequestSampling(params, PROMPT, VOCAB, EOS | frozenset(params.stop_token_ids), words).state(0)
    for token in generated:
        sequence.append(token)
        if sequence.sampling is not None:
            sequence.sampling.record(token)
    return sequence


def random_logits(rows, seed):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(logits, params, generated):
    """The order of the operations, token by token: bias, penalties, bad words, minimum length."""
    result = []
    for token, logit in enumerate(np.asarray(logits, dtype=np.float32)):
        logit += np.float32((params.logit_bias or {}).get(token, 0.0))
        if token in PROMPT or token in generated:
            factor = np.float32(params.repetition_penalty)
            logit = logit / factor if logit > 0 else logit * factor
        logit -= np.float32(params.frequency_penalty) * generated.count(token)
        logit -= np.float32(params.presence_penalty) * (token in generated)
        for word in params.bad_words_ids:
            if word[-1] == token and generated[len(generated) - len(word) + 1 :] == list(word[:-1]):
                logit = np.float32(-np.inf)
        if len(generated) < params.min_tokens and token in EOS:
            logit = np.float32(-np.inf)
        result.append(logit)
    return np.array(result, dtype=np.float32)


def test_order_of_operations_equals_its_definition():
    rng = np.random.default_rng(0)
    for seed in range(200):
        logits = random_logits(1, seed)
        generated = rng.integers(0, VOCAB, rng.integers(0, 9)).tolist()
        biased = rng.choice(VOCAB, 12, replace=False).tolist()
        params = SamplingParams(
            temperature=0.0,
            logit_bias={
                t: float(b) for t, b in zip(biased, rng.choice([-math.inf, -1e9, -3, 0.5, 4], 12), strict=True)
            },
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
            repetition_penalty=float(rng.uniform(0.5, 2)),
            bad_words_ids=[[int(rng.integers(VOCAB))], [*(generated[-1:] or [1]), int(rng.integers(VOCAB))]],
            min_tokens=int(rng.integers(0, 9)),
            max_tokens=20,
            logprobs=3,
        )
        before = logits.clone()
        result = sample(logits, [make_sequence(params, generated)])
        assert result.tokens == [int(adjusted(logits[0], params, generated).argmax())]
        assert torch.equal(logits, before), "the model's logits were changed"
        own = logits[0].log_softmax(-1)
        assert result.logprobs[0].logprob == own[result.tokens[0]].item(), "log-probabilities are the model's own"
        assert list(result.logprobs[0].top) == own.topk(3).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_of_minus_infinity(temperature):
    logits = random_logits(1, 0)
    for only in (7, 31):
        bias = {token: -math.inf for token in range(VOCAB) if token != only}
        params = SamplingParams(temperature=temperature, seed=0, logit_bias=bias)
        assert sample(logits, [make_sequence(params)]).tokens == [only]
    nothing = SamplingParams(temperature=temperature, logit_bias={token: -math.inf for token in range(VOCAB)})
    result = sample(random_logits(2, 0), [make_sequence(nothing), make_sequence(SamplingParams(temperature=0.0))])
    assert list(result.errors) == [0] and result.errors[0] == NOTHING_LEFT
    assert result.tokens[1] == int(random_logits(2, 0)[1].argmax())


def test_a_bias_that_leaves_nothing_is_refused():
    engine = LLMEngine(session=FakeSession(), num_pages=40)
    bias = {token: -math.inf for token in range(60)}
    with pytest.raises(RequestError, match="bad_words and logit_bias forbid every token"):
        engine.add_request("r", [5], SamplingParams(logit_bias=bias, bad_words_ids=[[t] for t in range(60, 64)]))
    assert not engine.has_unfinished()


def test_bias_shifts_the_distribution():
    logits = random_logits(1, 1).repeat(4000, 1)
    bias = {3: 1.5, 9: -2.0, 20: 4.0}
    params = [SamplingParams(seed=seed, logit_bias=bias) for seed in range(len(logits))]
    tokens = sample(logits, [make_sequence(p) for p in params]).tokens
    expected = torch.tensor([float(logits[0, t]) + bias.get(t, 0.0) for t in range(VOCAB)]).softmax(-1).numpy()
    counts = np.bincount(tokens, minlength=VOCAB) / len(tokens)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(0.25 / len(tokens))


def test_top_p_decays_and_resets():
    rng = np.random.default_rng(1)
    for _ in range(50):
        first, decay, least = (float(rng.uniform(low, 1)) for low in (0.2, 0.5, 0.01))
        params = SamplingParams(top_p=first, top_p_decay=decay, top_p_min=least, top_p_reset_id=3, seed=0)
        sequence, expected = make_sequence(params), first
        for token in rng.choice([3, 4, 5, 6], 30).tolist():
            assert sequence.sampling.top_p == expected
            sequence.sampling.record(token)
            expected = first if token == 3 else max(expected * decay, least)
    plain = make_sequence(SamplingParams(top_p=0.7, seed=0), generated=[3] * 20)
    assert plain.sampling.top_p == 0.7


def test_decayed_top_p_draws_from_the_decayed_nucleus():
    """Each token is that of a fresh request whose constant top_p is the decayed one, with the same random number."""
    params = SamplingParams(top_p=0.95, top_p_decay=0.6, top_p_min=0.1, top_p_reset_id=8, seed=9, max_tokens=100)
    sequence, top_p, generated, seen = make_sequence(params), 0.95, [], set()
    for step in range(60):
        logits = random_logits(1, step)
        logits[0, 8] += 4.0 * (step % 7 == 0)
        same = make_sequence(dataclasses.replace(params, top_p=top_p, top_p_decay=1.0))
        for _ in generated:
            same.sampling.random.random()
        token = sample(logits, [sequence]).tokens[0]
        assert token == sample(logits, [same]).tokens[0]
        generated.append(token)
        seen.add(top_p)
        top_p = 0.95 if token == 8 else max(top_p * 0.6, 0.1)
    assert 8 in generated and 0.1 in seen


def run(engine, requests):
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            entry = outputs.setdefault((output.request_id, output.index), ([], [], []))
            entry[0].extend(output.new_token_ids)
            entry[1].extend(output.logits or [])
            entry[2].append(output.finish_reason)
    engine.check_invariants()
    return outputs


def test_everything_together_survives_preemption_and_drafts():
    """Decay, bias, penalties and logits on few pages, beside other requests, equal the request alone."""
    requests = {}
    for index in range(8):
        params = SamplingParams(
            n=1 + index % 2,
            temperature=1.0 if index % 3 else 0.0,
            seed=index,
            max_tokens=30,
            ignore_eos=True,
            top_p=0.9,
            top_p_decay=0.9,
            top_p_min=0.3,
            top_p_reset_id=int(10 + index),
            logit_bias={20: 2.0, 21: -math.inf},
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            return_logits=True,
        )
        requests[f"r{index}"] = ([5, 6, index], params)
    alone = {}
    for name, request in requests.items():
        alone |= run(LLMEngine(session=FakeSession(), num_pages=100), {name: request})
    engine = LLMEngine(session=FakeSession(), num_pages=24)
    together = run(engine, requests)
    assert engine.stats()["num_preemptions"] > 0
    drafted = {}
    for name, (prompt, params) in requests.items():
        draft = alone[name, 0][0][:3]
        drafted[name] = prompt, dataclasses.replace(params, draft_token_ids=draft)
    verified = run(LLMEngine(session=FakeSession(max_draft_len=4), num_pages=100), drafted)
    for other in (together, verified):
        assert {key: entry[0] for key, entry in other.items()} == {key: entry[0] for key, entry in alone.items()}
    for (name, index), (tokens, logits, _) in alone.items():
        assert len(tokens) == len(logits) == 30
        context = list(requests[name][0])
        for position, (token, row) in enumerate(zip(tokens, logits, strict=True)):
            expected = context_logits(context, 0, 64)
            assert row.dtype == np.float32 and row.shape == (64,) and np.array_equal(row, expected)
            for other in (together, verified):
                assert np.array_equal(other[name, index][1][position], expected)
            context.append(token)


def test_logits_are_given_only_to_who_asks_and_are_copies():
    engine = LLMEngine(session=FakeSession(), num_pages=40)
    requests = {
        "greedy": ([5], SamplingParams(temperature=0.0, max_tokens=3, return_logits=True)),
        "other": ([5], SamplingParams(temperature=0.0, max_tokens=3)),
    }
    outputs = run(engine, requests)
    assert outputs["greedy", 0][0] == outputs["other", 0][0] and not outputs["other", 0][1]
    rows = outputs["greedy", 0][1]
    assert [int(row.argmax()) for row in rows] == outputs["greedy", 0][0]
    rows[0][:] = 0
    assert rows[1].any() and rows[0].flags.owndata
