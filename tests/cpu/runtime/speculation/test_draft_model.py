"""A draft model: what it drafts, what it keeps, what happens where it cannot."""

import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

from kvforge.common.errors import EngineError
from kvforge.runtime import SamplingParams
from kvforge.runtime.config import resolve_config
from kvforge.runtime.speculation import draft_model
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_model import DraftModel, make_drafter
from tests.support.rounding import assert_within, sum_error
from tests.support.schedules.fixed_drafting import speculative_engine
from tests.support.sessions.fake import FakeSession, context_logits, fake_manifest

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY = {"temperature": 0.0, "max_tokens": 13, "ignore_eos": True}


def drafter_of(session, **limits):
    return DraftModel(session, resolve_config(session.manifest, 0, **{"num_pages": 64, **limits}), seed=0)


class Sometimes(FakeSession):
    """The target's logits in most calls, else others."""

    def upper(self, step, pools):
        logits = super().upper(step, pools)
        return logits.flip(-1) if self.num_upper_calls % 4 == 0 else logits


def serve(engine, requests):
    """{request id: tokens of each step}, with invariants of both engines after every step."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, SamplingParams(**params))
    steps = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.finish_reason != "error", output.stop_reason
            steps.setdefault(output.request_id, []).append(output.new_token_ids)
        engine.check_invariants()
        engine.drafting.drafter.check_invariants()
    assert engine.stats()["num_used_pages"] == 0 and engine.drafting.drafter.cache.pool.num_used == 0
    return steps


def text(steps):
    return list(chain.from_iterable(steps))


def plain(prompt, length, seed=0, vocab_size=64):
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(context_logits(tokens, seed, vocab_size).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "params",
    [GREEDY, {**GREEDY, "temperature": 1.0}, {**GREEDY, "temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.01}],
    ids=["greedy", "drawn", "drawn with filters"],
)
@pytest.mark.parametrize("length", [1, 3, 5])
def test_the_model_itself_as_draft_gives_a_token_more_than_drafts_in_every_step(params, length):
    engine = speculative_engine(FakeSession(max_draft_len=8), drafter_of(FakeSession(page_size=16)), length)
    count = 1 + 4 * (length + 1)
    params = {**params, "max_tokens": count}
    steps = serve(engine, {"a": (PROMPT, params), "b": (PROMPT[:2], params)})
    for tokens in steps.values():
        assert list(map(len, tokens)) == [1, *[length + 1] * 4]
    stats = engine.stats()
    assert stats["num_draft_tokens"] == stats["num_accepted_draft_tokens"] == 8 * length
    if params["temperature"] == 0:
        assert text(steps["a"]) == plain(PROMPT, count)


def run_random(seed):
    """Random requests with a draft cache that is too small for all, pages given back to it poisoned, and requests that
    end early; returns what the engine counted."""
    rng = random.Random(seed)
    drafts = Sometimes(page_size=rng.choice([2, 4, 8]), max_num_tokens=rng.choice([3, 16, 64]))
    limits = dict(num_pages=rng.choice([40, 60, 150]), max_num_seqs=rng.choice([2, 3, 8]), max_seq_len=64)
    drafter = drafter_of(drafts, **limits)
    session = FakeSession(max_draft_len=7)
    engine = speculative_engine(session, drafter, rng.choice([1, 3, 7]), num_pages=rng.choice([16, 40]))
    prompts = {str(i): [rng.randrange(3, 64) for _ in range(rng.randint(1, 30))] for i in range(10)}
    lengths = {request_id: rng.randint(1, 24) for request_id in prompts}
    waiting, got = list(prompts), {request_id: [] for request_id in prompts}
    aborted = set(rng.sample(waiting, 2))
    while waiting or engine.has_unfinished():
        if waiting and rng.random() < 0.5:
            request_id = waiting.pop()
            params = {**GREEDY, "max_tokens": lengths[request_id]}
            engine.add_request(request_id, prompts[request_id], SamplingParams(**params))
        for output in engine.step():
            got[output.request_id] += output.new_token_ids
        for request_id in aborted:
            if len(got[request_id]) > 2:
                engine.abort(request_id)
        engine.check_invariants()
        drafter.check_invariants()
        drafts.poison_pages(drafter.cache.pool.free_pages)
    for request_id, prompt in prompts.items():
        expected = plain(prompt, lengths[request_id])
        assert got[request_id] == (expected[: len(got[request_id])] if request_id in aborted else expected)
    stats = engine.stats()
    assert stats["num_used_pages"] == drafter.cache.pool.num_used == stats["num_failed_steps"] == 0
    assert not engine.drafting._has_failed
    return stats


def test_any_draft_model_leaves_tokens_as_they_are(request):
    counts = Counter()
    for seed in range(100 if request.config.getoption("--full") else 10):
        stats = run_random(seed)
        counts.update(
            {name: stats[name] for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_preemptions")}
        )
    assert counts["num_preemptions"] > 5
    assert 100 < counts["num_accepted_draft_tokens"] < counts["num_draft_tokens"] - 100


def test_a_long_prompt_is_caught_up_with_in_chunks_one_a_call():
    drafts = FakeSession(max_num_tokens=8)
    drafter = drafter_of(drafts)
    engine = speculative_engine(FakeSession(max_draft_len=8), drafter, 2)
    steps = serve(engine, {"a": (list(range(3, 24)), GREEDY)})
    # 21 prompt tokens and then 22, 23: chunks of 8, 8 and what is left, drafts from the third call on.
    assert [len(tokens) for tokens in steps["a"]][:5] == [1, 1, 1, 3, 3] and drafts.max_tokens_seen == 8


def test_the_cache_keeps_what_is_right_and_computes_the_rest_again():
    drafts = FakeSession(seed=1)
    drafter = drafter_of(drafts)
    engine = speculative_engine(FakeSession(max_draft_len=8), drafter, 3)
    engine.add_request("a", PROMPT, SamplingParams(**GREEDY))
    engine.step()
    for _ in range(4):
        engine.step()
        (sequence,) = engine.scheduler.running
        twin = drafter.cache.twins[sequence]
        num_right = twin.num_computed - 2  # its last two drafts' K,V of three
        assert twin.tokens[: sequence.length - 1].tolist()[:num_right] == sequence.tokens[:num_right].tolist()
        calls = drafts.num_lower_calls
        engine.drafting.drafter.draft([sequence], [1])
        assert drafts.num_lower_calls == calls + 1
        end = sequence.length
        pages = torch.tensor(twin.pages)
        stored = drafts.pools[0][0][pages].reshape(-1, 2)[:end]
        assert stored[:, 0].tolist() == sequence.tokens[:end].tolist()


def test_sequences_without_room_are_not_drafted_for():
    session, drafts = FakeSession(max_draft_len=4), FakeSession()
    drafter = drafter_of(drafts, num_pages=12, max_seq_len=40)
    engine = speculative_engine(session, drafter, 4)
    requests = {str(i): ([5 + i] * 16, {**GREEDY, "max_tokens": 12}) for i in range(4)}
    steps = serve(engine, requests)
    for request_id, (prompt, _) in requests.items():
        assert text(steps[request_id]) == plain(prompt, 12)
    lengths = sorted(len(tokens) for tokens in steps.values())
    assert lengths[0] == 4 and lengths[-1] > 5, "the first get theirs, the last has to wait"


def test_slots_of_the_draft_engine_may_be_fewer():
    drafter = drafter_of(FakeSession(max_num_seqs=2))
    engine = speculative_engine(FakeSession(max_draft_len=4), drafter, 4)
    steps = serve(engine, {str(i): ([5 + i] * 3, GREEDY) for i in range(5)})
    assert all(text(tokens) == plain([5 + int(i)] * 3, 13) for i, tokens in steps.items())
    stats = engine.stats()
    assert stats["draft_model_num_pages"] == 64 and stats["draft_model_num_used_pages"] == 0
    assert stats["draft_model_num_steps"] > 4 and stats["draft_model_kv_cache_bytes"] == 64 * fake_manifest().page_bytes


def test_a_sequence_longer_than_the_draft_engine_allows_goes_on_alone():
    drafter = drafter_of(FakeSession(max_seq_len=12))
    engine = speculative_engine(FakeSession(max_draft_len=4), drafter, 4)
    steps = serve(engine, {"a": (PROMPT, GREEDY)})
    # Seven tokens and four drafts; eleven computed would need drafts of places that there are not.
    assert [len(tokens) for tokens in steps["a"]] == [1, 5, 2, *[1] * 5] and text(steps["a"]) == plain(PROMPT, 13)


@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_failing_draft_engine_fails_no_request(after, caplog):
    drafts = FakeSession()
    drafts.fail_on = lambda session: session.num_lower_calls >= after
    engine = speculative_engine(FakeSession(max_draft_len=4), drafter_of(drafts), 3)
    steps = serve(engine, {"a": (PROMPT, GREEDY), "b": (PROMPT[:3], GREEDY)})
    assert text(steps["a"]) == plain(PROMPT, 13) and text(steps["b"]) == plain(PROMPT[:3], 13)
    assert "a drafter failed" in caplog.text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_drafts_end_where_the_draft_models_logits_are_not_finite(value):
    class Broken(FakeSession):
        def upper(self, step, pools):
            logits = super().upper(step, pools)
            if self.num_upper_calls % 3 == 0:
                logits[:, 7] = value
            return logits

    for changes in ({}, {"temperature": 1.0}):
        engine = speculative_engine(FakeSession(max_draft_len=4), drafter_of(Broken()), 4)
        steps = serve(engine, {"a": (PROMPT, {**GREEDY, **changes})})
        assert len(text(steps["a"])) == 13 and max(map(len, steps["a"])) == 3
        assert changes or text(steps["a"]) == plain(PROMPT, 13)


def test_drafts_are_drawn_only_where_rejection_gives_the_requests_tokens():
    drafter = drafter_of(FakeSession())
    engine = speculative_engine(FakeSession(max_draft_len=4), drafter, 2)
    asked = []
    draft = drafter.draft
    drafter.draft = lambda *arguments: asked.append((arguments[0], draft(*arguments))) or asked[-1][1]
    drawn = {"temperature": 0.9, "top_p": 0.8}
    walked = [{"seed": 3}, {"logprobs": 1}, {"presence_penalty": 0.2}, {"min_tokens": 2}, {"top_p_decay": 0.9}]
    requests = {"drawn": (PROMPT, {**GREEDY, **drawn}), "greedy": (PROMPT, GREEDY)}
    requests |= {str(i): (PROMPT, {**GREEDY, **drawn, **changes}) for i, changes in enumerate(walked)}
    serve(engine, requests)
    pairs = [pair for sequences, drafts in asked for pair in zip(sequences, drafts, strict=True)]
    assert {sequence.request_id for sequence, draft in pairs if draft.probs is not None} == {"drawn"}
    for _, draft in pairs:
        if draft.probs is not None:
            assert draft.probs.shape == (len(draft.token_ids), 64)
            assert_within(draft.probs.sum(-1), torch.ones(len(draft.token_ids)), sum_error(64))
            assert all(draft.probs[i, token] > 0 for i, token in enumerate(draft.token_ids))


def test_drafts_end_with_a_token_that_ends_the_sequence():
    expected = plain(PROMPT, 13)
    place = next(i for i in range(2, 8) if expected[i] not in expected[:i])
    engine = speculative_engine(FakeSession(max_draft_len=8), drafter_of(FakeSession()), 8)
    steps = serve(engine, {"a": (PROMPT, {**GREEDY, "stop_token_ids": [expected[place]]})})
    assert text(steps["a"]) == expected[: place + 1] and engine.stats()["num_draft_tokens"] == place


def test_a_draft_engine_needs_the_same_vocabulary_and_room(tmp_path, monkeypatch):
    name = "tokenizer/tokenizer.json"
    target = fake_manifest(max_draft_len=4, files={name: "a"})
    runtime = resolve_config(target, 0, num_pages=64)
    config = SpeculativeConfig("draft_model", 4, draft_engine=tmp_path)
    session = FakeSession()
    monkeypatch.setattr(draft_model, "load_session", lambda directory, manifest: session)
    for changes, message in (
        ({"vocab_size": 65, "files": {name: "a"}}, "65 tokens and the engine 64"),
        ({"files": {name: "b"}}, "another tokenizer"),
        ({"files": {name: "a"}, "kv_policy": "shadowkv"}, "KV policy shadowkv"),
        ({"files": {name: "a"}, "kv_dtype": "kivi2", "page_size": 32, "head_dim": 32}, "sealed before drafts are"),
    ):
        monkeypatch.setattr(draft_model, "load_manifest", lambda path, changes=changes: fake_manifest(**changes))
        with pytest.raises(EngineError, match=message):
            make_drafter(config, target, runtime)
    same = fake_manifest(files={name: "a"}, max_seq_len=64, max_num_seqs=16)
    session.manifest = same

    def no_memory(directory, manifest):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(draft_model, "load_manifest", lambda path: same)
    drafter = make_drafter(config, target, runtime)
    limits = drafter.cache.config
    assert (limits.max_seq_len, limits.max_num_seqs, limits.num_pages) == (64, 8, 8 * 16)
    assert drafter.stats()["draft_model_kv_cache_bytes"] == 128 * same.page_bytes
    monkeypatch.setattr(draft_model, "load_session", no_memory)
    with pytest.raises(EngineError, match="do not fit beside the engine"):
        make_drafter(config, target, runtime)
