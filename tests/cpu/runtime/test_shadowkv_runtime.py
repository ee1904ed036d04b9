"""ShadowKV in the runtime on graphs of real models: texts do not depend on schedules, bytes are the policy's, and what
does not fit or fails ends cleanly."""

import dataclasses
import random
from collections import Counter

import pytest

from kvforge.common.errors import EngineError, RequestError
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.config import resolve_config
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.sessions.pools import device_bytes, host_bytes
from tests.support.models.small_models import small_session
from tests.support.schedules.engine_schedules import PlannedRequest, check_tokens, random_plan, run_plan
from tests.support.sessions.fake import FakeSession, fake_manifest
from tests.support.sessions.fake_shadow import FakeShadowSession

pytestmark = pytest.mark.usefixtures("one_thread")
POLICY = ShadowKV(rank=8, chunk_size=2, sparse_budget=8, num_outlier_chunks=2, num_local_tokens=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SHAPES = {"swiftkv": {}, "plain MHA": {"cut": 3, "num_layers": 3, "num_kv_heads": 4}, "MQA": {"num_kv_heads": 1}}


def make_session(policy=POLICY, **changes):
    return small_session({"kv_policy": str(policy)}, **{"head_dim": 10, "cut": 1, **changes})


def alone(session, request):
    engine = LLMEngine(session=session, num_pages=32, enable_prefix_cache=False)
    engine.add_request("alone", request.prompt, dataclasses.replace(request.params, n=1))
    tokens, reason = [], None
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
            reason = output.finish_reason
        engine.check_invariants()
    return tokens, reason


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_texts_over_schedules_equal_those_alone(shape):
    session, counts = make_session(**SHAPES[shape]), Counter()
    for seed in range(6):
        rng = random.Random(seed)
        plan = random_plan(seed, page_sizes=(4,), vocab_size=96, max_requests=5, sampled=False)
        expected = {}
        for request in plan.requests:
            text = alone(session, request)
            expected |= {(request.request_id, index): text for index in range(request.params.n)}
        engine = LLMEngine(
            session=session,
            num_pages=10 + rng.choice([0, 2, 5]),
            num_state_pages=40,
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
        )
        for pool in engine.runner.pools:
            for tensor in pool:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 99)
        tokens, reasons, aborted = run_plan(engine, plan)
        check_tokens(tokens, reasons, aborted, expected, seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == stats["num_used_state_pages"] == 0 == stats["num_failed_steps"]
        counts.update(
            factored=stats["num_transitions"],
            preempted=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            short=sum(not POLICY.is_factored(len(request.prompt)) for request in plan.requests),
        )
    assert min(counts.values()) > 3, counts


def test_bytes_of_the_pools_are_the_policys():
    """One sequence as long as the engine takes: what is allocated for it is what the policy says it keeps, and the
    pages of its exact prompt."""
    policy = ShadowKV(rank=8, chunk_size=2, sparse_budget=8, num_outlier_chunks=2, num_local_tokens=4)
    session = make_session(policy)
    manifest, cache = session.manifest, session.manifest.owner_cache
    needed = resolve_config(manifest, 0, max_num_seqs=1)
    pages = 128 // 4
    assert (needed.num_pages, needed.num_state_pages) == (pages, pages)
    engine = LLMEngine(session=session, num_pages=pages, num_state_pages=pages, max_num_seqs=1)
    pools = engine.runner.pools
    compact = cache.padded(policy.compact_length(128)) * cache.token_bytes
    exact = manifest.model.num_owners * pages * cache.page_size * cache.token_bytes
    assert device_bytes(manifest, pools) == exact + manifest.model.num_owners * (
        policy.device_bytes(cache, 128) - compact
    )
    assert host_bytes(manifest, pools) == manifest.model.num_owners * policy.host_tier.host_bytes(cache, 128)
    stats = engine.stats()
    assert (stats["kv_device_bytes"], stats["kv_host_bytes"]) == (
        device_bytes(manifest, pools),
        host_bytes(manifest, pools),
    )
    assert stats["kv_device_used_bytes"] == stats["kv_host_used_bytes"] == 0
    prompt = [index % 90 for index in range(101)]
    engine.add_request("r", prompt, dataclasses.replace(GREEDY, max_tokens=14))
    for _ in range(12):
        engine.step()
    stats = engine.stats()
    assert stats["num_compacted"] == 1
    num_cached = engine.scheduler.running[0].num_computed - len(prompt)
    assert stats["kv_device_used_bytes"] == manifest.model.num_owners * policy.device_bytes(
        cache, len(prompt), num_cached
    )
    assert stats["kv_host_used_bytes"] == manifest.model.num_owners * policy.host_tier.host_bytes(cache, len(prompt))


WHOLE = 0.1
"""Ten sequences or so fit: what remains of one is left over."""


def test_memory_is_divided_in_the_proportion_that_factored_prompts_need():
    policy = ShadowKV(rank=160, chunk_size=8, sparse_budget=2048)
    shape = dict(num_layers=2, num_kv_heads=8, num_heads=32, head_dim=128, max_position=2**17)
    limits = dict(page_size=64, max_seq_len=122 * 1024, max_num_seqs=48, max_num_tokens=2048)
    manifest = fake_manifest(
        **shape,
        **limits,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        kv_policy=policy.name,
        kv_policy_parameters=policy.parameters,
    )
    pages, cache = 122 * 16, manifest.owner_cache
    config = resolve_config(manifest, 0, kv_cache_gib=4.0)
    num_seqs = config.num_state_pages / pages
    # One prompt exactly, and all others factored.
    kept = 2 * policy.device_bytes(cache, 122 * 1024)
    exact = pages * manifest.page_bytes
    assert num_seqs == pytest.approx((4 * 2**30 - exact) / kept, rel=WHOLE)
    assert config.num_pages >= pages + (num_seqs - 1) * policy.compact_length(122 * 1024) / 64
    small = resolve_config(manifest, 0, kv_cache_gib=0.1, max_seq_len=2048)  # nothing of that length is factored
    slots = 48 * 2 * (160 * 8 * 128 * 2 + 4 * 8 * 256)
    assert (small.num_state_pages, small.num_pages) == (1, (int(0.1 * 2**30) - slots) // manifest.page_bytes)
    with pytest.raises(EngineError, match="raise --kv-cache-gib or lower --max-seq-len"):
        resolve_config(manifest, 0, kv_cache_gib=0.5)
    room = 2**30
    bounded = resolve_config(manifest, 8 * room, kv_cache_gib=4.0)
    assert pages <= bounded.num_state_pages < config.num_state_pages  # the host has less for values
    with pytest.raises(EngineError, match="give 1 to"):
        resolve_config(manifest, 0, num_pages=9, num_state_pages=0)
    with pytest.raises(EngineError, match="leave it out"):
        resolve_config(FakeSession().manifest, 0, num_pages=9, num_state_pages=1)


def test_a_prompt_beyond_the_pools_is_refused():
    engine = LLMEngine(session=make_session(), num_pages=32, num_state_pages=10)
    engine.add_request("fits", [5] * 40, GREEDY)
    with pytest.raises(RequestError, match="11 pages of the KV policy's own, but the engine has 10"):
        engine.add_request("r", [5] * 41, GREEDY)
    engine = LLMEngine(session=make_session(), num_pages=15, num_state_pages=32)
    engine.add_request("long after its prompt", [5] * 60, dataclasses.replace(GREEDY, max_tokens=40))
    while engine.has_unfinished():
        assert not any(output.finish_reason == "error" for output in engine.step())
    with pytest.raises(RequestError, match="raise the KV cache size"):
        engine.add_request("r", [5] * 61, GREEDY)


def test_a_failed_factoring_ends_a_sequence_that_the_step_only_factors(monkeypatch):
    """A preempted sequence's prompt is computed again; in the step that factors it another prompt takes all tokens."""
    engine = LLMEngine(
        session=FakeShadowSession(), num_pages=64, num_state_pages=64, max_num_tokens=4, enable_prefix_cache=False
    )
    engine.add_request("again", [7] * 15, GREEDY)
    while engine.stats()["num_transitions"] == 0:
        engine.step()
    engine.step()
    scheduler, (sequence,) = engine.scheduler, engine.scheduler.running
    scheduler.preempt(Schedule(0), sequence)
    for _ in range(3):
        engine.step()
    engine.add_request("first", [6] * 30, dataclasses.replace(GREEDY, priority=-1))
    engine.step()
    assert sequence.is_due and sequence.length - sequence.num_computed > 1
    engine.check_invariants()

    def fail(transitions):
        raise RuntimeError("no memory for it")

    monkeypatch.setattr(engine.runner._state, "apply", fail)
    outputs = engine.step()
    assert {(output.request_id, output.finish_reason) for output in outputs} == {("again", "error"), ("first", "error")}
    engine.check_invariants()
    assert engine.stats()["num_used_pages"] == engine.stats()["num_used_state_pages"] == 0


@pytest.mark.parametrize("key", [float("nan"), float("-inf"), 3e38])
def test_keys_that_cannot_be_factored_end_their_own_sequence(key):
    session, prompts = make_session(), {"bad": [5, 7] * 20, "good": [9, 4, 11] * 13}
    expected = alone(session, PlannedRequest("good", prompts["good"], GREEDY, 0, None))
    engine = LLMEngine(session=session, num_pages=64)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    outputs = engine.step()
    bad = next(sequence for sequence in engine.scheduler.running if sequence.request_id == "bad")
    engine.runner.pools[0][0][bad.pages[1], 2] = key
    while engine.has_unfinished():
        outputs += engine.step()
        engine.check_invariants()
    reasons = {output.request_id: output.finish_reason for output in outputs if output.finished}
    assert reasons == {"bad": "error", "good": expected[1]}
    assert [t for output in outputs if output.request_id == "good" for t in output.new_token_ids] == expected[0]
    assert engine.stats()["num_failed_steps"] == 0


def test_drafts_of_factored_sequences_are_dropped():
    engine = LLMEngine(session=make_session(), num_pages=32)
    engine.add_request("r", [5] * 50, dataclasses.replace(GREEDY, draft_token_ids=(3, 4, 5)))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats()["num_draft_tokens"] == 0
