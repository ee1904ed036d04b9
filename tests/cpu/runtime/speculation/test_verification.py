"""Verification of drafts: by one call of the engine's graph or token by token, and what ends a sequence within them."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.config import resolve_config
from kvforge.runtime.sampling.draw import draw_tokens, filter_logits
from kvforge.runtime.sampling.filters import Filters
from kvforge.runtime.sampling.sampler import NOT_FINITE, sample
from kvforge.runtime.speculation import verification
from kvforge.runtime.speculation.draft_model import DraftModel
from kvforge.runtime.speculation.drafter import Draft
from tests.support.schedules.fixed_drafting import speculative_engine
from tests.support.sessions.fake import FakeSession, context_logits

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


class CountingSession(FakeSession):
    """Counts calls of ``verify``."""

    def __init__(self, **changes):
        super().__init__(**{"max_draft_len": 6, **changes})
        self.verified = []

    def verify(self, step):
        self.verified.append((len(step.temperature), len(step.draft_ids), len(step.draft_probs)))
        return super().verify(step)


class Guesser:
    """Drafts right tokens of the fake model, each of them wrong with the probability ``wrong``; drawn if ``drawn``."""

    def __init__(self, wrong=0.3, drawn=False, seed=0):
        self.wrong, self.drawn, self.random = wrong, drawn, random.Random(seed)

    def draft(self, sequences, counts):
        return [self.one(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def one(self, sequence, count):
        tokens, probs = sequence.tokens[: sequence.length].tolist(), []
        for _ in range(count):
            token = int(context_logits(tokens, 0, 64).argmax())
            if self.random.random() < self.wrong:
                token = (token + 1) % 64
            tokens.append(token)
            probs.append(torch.nn.functional.one_hot(torch.tensor(token), 64).float())
        drafted = tuple(tokens[sequence.length :])
        return Draft(drafted, torch.stack(probs) if self.drawn and probs else None)

    def forget(self, sequence):
        pass


def serve(engine, requests):
    """{request id: (tokens of each step, last output)}; the engine's invariants hold after every step."""
    for request_id, params in requests.items():
        engine.add_request(request_id, PROMPT, SamplingParams(**params))
    steps, last = {}, {}
    while engine.has_unfinished():
        for output in engine.step():
            steps.setdefault(output.request_id, []).append(output)
            last[output.request_id] = output
        engine.check_invariants()
    assert engine.stats()["num_used_pages"] == 0
    return steps, last


def tokens_of(outputs):
    return [token for output in outputs for token in output.new_token_ids]


def plain(params):
    return serve(LLMEngine(session=FakeSession(), num_pages=60), {"a": params})[0]["a"]


def test_greedy_sequences_of_a_step_are_verified_in_one_call():
    session = CountingSession()
    engine = speculative_engine(session, Guesser(), 4)
    steps, _ = serve(engine, {str(i): GREEDY for i in range(5)})
    assert all(tokens_of(outputs) == tokens_of(plain(GREEDY)) for outputs in steps.values())
    assert max(session.verified) == (5, 20, 0) and len(session.verified) < session.num_upper_calls


WALKED = [
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.8, "top_k": 20, "logprobs": 2},
    {"logprobs": 1, "return_logits": True},
    {"presence_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.1, "seed": 5, "frequency_penalty": 0.4, "min_tokens": 6, "stop_token_ids": [9, 11, 23]},
    {"bad_words_ids": [[4], [8, 10]], "logit_bias": {11: 2.0}},
    {"temperature": 0.7, "seed": 6, "top_p": 0.9, "top_p_decay": 0.8},
]


@pytest.mark.parametrize("drawn", [False, True])
def test_what_needs_the_walk_is_as_without_drafts_beside_what_does_not(drawn):
    """Whether drafts claim to be drawn or not: tokens, log-probabilities and logits."""
    session = CountingSession(max_num_seqs=16, max_num_tokens=128)
    engine = speculative_engine(session, Guesser(drawn=drawn), 4, num_pages=200)
    requests = {str(i): {**GREEDY, **changes} for i, changes in enumerate(WALKED)}
    steps, last = serve(engine, {**requests, "greedy": GREEDY, "drawn": {**GREEDY, "temperature": 1.0}})
    assert tokens_of(steps["greedy"]) == tokens_of(plain(GREEDY)) and len(tokens_of(steps["drawn"])) == 12
    for request_id, params in requests.items():
        expected = plain(params)
        assert tokens_of(steps[request_id]) == tokens_of(expected), request_id
        assert last[request_id].finish_reason == expected[-1].finish_reason
        for name in ("logprobs", "logits"):
            got = [entry for output in steps[request_id] for entry in getattr(output, name) or ()]
            want = [entry for output in expected for entry in getattr(output, name) or ()]
            assert len(got) == len(want) and all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    proposals = [num_probs for _, _, num_probs in session.verified]
    assert proposals.count(0) > 2 and max(proposals) == (4 if drawn else 0), "one call for greedy ones, one for drawn"


SAMPLED = [
    {"temperature": 0.4, "seed": 1},
    {"temperature": 0.6, "seed": 2, "top_k": 3},
    {"temperature": 0.5, "seed": 3, "top_p": 0.8, "stop_token_ids": [9, 11, 23]},
    {"temperature": 0.7, "seed": 4, "min_p": 0.1, "n": 2},
]


def test_tokens_after_drafts_are_drawn_in_one_call_with_the_random_numbers_of_decoding_without(monkeypatch):
    """Beside a sequence without drafts, a greedy one and one that goes along its drafts."""
    calls = []

    def counting(logits, sequences, *rest):
        calls.append(len(sequences))
        return sample(logits, sequences, *rest)

    monkeypatch.setattr(verification, "sample", counting)
    requests = {str(i): {**GREEDY, "max_tokens": 40, **changes} for i, changes in enumerate(SAMPLED)}
    engine = speculative_engine(CountingSession(max_num_seqs=16, max_num_tokens=128), Guesser(0.2), 4, num_pages=200)
    steps, _ = serve(engine, {**requests, "late": {**GREEDY, "temperature": 0.5, "seed": 9, "max_tokens": 1}})
    stats = engine.stats()
    assert stats["num_accepted_draft_tokens"] > 20 and stats["num_accepted_draft_tokens"] < stats["num_draft_tokens"]
    assert max(calls) > 20 and len(calls) <= stats["num_iterations"]
    beside = speculative_engine(CountingSession(max_num_seqs=16, max_num_tokens=128), Guesser(0.2), 4, num_pages=200)
    mixed, _ = serve(beside, {**requests, "greedy": GREEDY, "walks": {**GREEDY, **WALKED[4]}})
    for request_id, params in {**requests, "greedy": GREEDY, "walks": {**GREEDY, **WALKED[4]}}.items():
        for index in range(params.get("n", 1)):
            expected, *found = (
                tokens_of(output for output in outputs if output.index == index)
                for outputs in (plain(params), mixed[request_id], *([steps[request_id]] if request_id in steps else []))
            )
            assert all(tokens == expected for tokens in found), (request_id, index)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ending", ["stop token", "stop word", "length", "end of text"])
def test_nothing_is_given_after_the_end_of_a_sequence_within_its_drafts(temperature, ending):
    """At temperature 1 with drafts that the target always accepts, because they are drawn from it."""
    ends = list(range(30, 40))
    changes = {
        "stop token": {"stop_token_ids": ends},
        "stop word": {"stop_words_ids": [[token] for token in ends]},
        "length": {"max_tokens": 4},
        "end of text": {"ignore_eos": False},
    }[ending]
    reasons = Counter()
    for seed in range(8):
        drafts = FakeSession()
        drafter = DraftModel(drafts, resolve_config(drafts.manifest, 0, num_pages=64), seed=seed)
        session = CountingSession(eos_token_ids=tuple(ends) if ending == "end of text" else ())
        engine = speculative_engine(session, drafter, 6)
        steps, last = serve(engine, {"a": {**GREEDY, "temperature": temperature, **changes}})
        tokens, reason = tokens_of(steps["a"]), last["a"].finish_reason
        if ending == "length":
            assert len(tokens) == 4 and reason == "length"
        else:
            places = [place for place, token in enumerate(tokens) if token in ends]
            assert places == ([len(tokens) - 1] if reason == "stop" else []) and (reason == "stop" or len(tokens) == 12)
        reasons[reason] += 1
        assert drafter.cache.pool.num_used == 0
        drafter.check_invariants()
    assert ending == "length" or reasons["stop"] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_logits_that_are_not_finite_end_their_sequence_there_and_no_other(temperature, value, place):
    class Broken(CountingSession):
        def upper(self, step, pools):
            logits = super().upper(step, pools)
            if step.survivor_start[1] == 5:
                logits[place, 17] = value
            return logits

    drafts = FakeSession()
    drafter = DraftModel(drafts, resolve_config(drafts.manifest, 0, num_pages=64))
    engine = speculative_engine(Broken(), drafter, 4, enable_prefix_cache=False)
    params = {**GREEDY, "temperature": temperature}
    engine.add_request("a", PROMPT, SamplingParams(**params))
    engine.add_request("b", PROMPT[:3], SamplingParams(**params))
    engine.step()
    first, second = engine.step()
    assert (first.request_id, first.finish_reason, first.stop_reason) == ("a", "error", NOT_FINITE.words)
    assert len(first.new_token_ids) == place and not second.finished and len(second.new_token_ids) == 5
    engine.check_invariants()
    drafter.check_invariants()
    while engine.has_unfinished():
        (output,) = engine.step()
        assert output.request_id == "b"
        engine.abort("b")


def test_more_drafts_than_the_graph_takes_are_walked():
    expected = tokens_of(plain({**GREEDY, "max_tokens": 30}))
    session = CountingSession(max_draft_len=1, max_num_seqs=16)
    engine = LLMEngine(session=session, num_pages=60)
    params = {**GREEDY, "max_tokens": 30, "draft_token_ids": expected[:20]}
    steps, _ = serve(engine, {"a": params})
    assert len(steps["a"][0].new_token_ids) == 21 and tokens_of(steps["a"]) == expected and not session.verified


def test_filtered_logits_are_those_that_can_be_drawn():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(100, 700, generator=generator)
    logits[::5, 7] = logits[::5, 9]
    temperature = 0.5 + torch.rand(100, generator=generator)
    top_k = torch.where(torch.rand(100, generator=generator) < 0.5, torch.randint(1, 400, (100,)), 700)
    top_p = torch.where(torch.rand(100, generator=generator) < 0.5, torch.rand(100, generator=generator) + 1e-3, 1.0)
    min_p = torch.where(torch.rand(100, generator=generator) < 0.5, torch.rand(100, generator=generator) / 50, 0.0)
    filters = Filters(temperature, top_k, top_p.clamp(max=1.0), min_p)
    filtered = filter_logits(logits, filters)
    kept = filtered > -torch.inf
    assert torch.equal(filtered[kept], logits[kept]) and (kept.sum(-1) >= 1).all() and not kept.all()
    drawn = torch.zeros_like(kept)
    rows = torch.arange(100)
    for uniform in torch.linspace(0, 1 - 2**-24, 200):
        drawn[rows, draw_tokens(logits, filters, uniform.expand(100))] = True
    assert not (drawn & ~kept).any(), "a token is drawn that the filter drops"
    # Those with an even chance to be hit once are all there.
    chance = (filtered / temperature[:, None]).softmax(-1)
    assert (drawn | ~kept | (chance < 1 / 100)).all()
