"""What a rule keeps, and the texts that follow, depend on the sequence alone: not on batches, chunks, pages, prefixes,
preemptions or neighbours."""

import dataclasses
import random
from collections import Counter

import pytest

from kvforge.kv_policies import Need, parse
from kvforge.runtime import LLMEngine
from tests.support.eviction.kept import KeptSets
from tests.support.models.small_models import small_session
from tests.support.schedules.engine_schedules import check_tokens, random_plan, run_plan

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = {
    "streaming": "streaming:budget=12,sinks=3",
    "streaming by blocks": "streaming:budget=14,block=5,sinks=2",
    "true positions": "streaming:budget=12,sinks=3,cache_positions=0",
    "recent": "recent:budget=12",
    "h2o": "h2o:budget=12",
    "scissorhands": "scissorhands:budget=12,history=9,recent=2",
    "tova": "tova:budget=12",
    "snapkv": "snapkv:budget=12,window=5",
    "adakv": "adakv:budget=12,window=3,floor_percent=25",
    "pyramid": "pyramid:budget=12,window=3,beta=4",
    "simlayer": "simlayer:budget=12,sinks=2,recent=2",
    "fastgen": "fastgen:budget=12,window=5,frequent=3,recent=3,recover_percent=80",
    "kvzip": "kvzip:budget=12,chunk=9,sinks=2",
    "kvzap": "kvzap:budget=12,block=4,window=3,threshold=20",
    "kvzap by threshold": "kvzap:budget=64,block=4,window=3,threshold=40",
    "expected": "expected:budget=12,window=5,sinks=2",
    "squeeze": "squeeze:budget=12,window=3,similar=5",
    "keys of heads that share": "keydiff+adakv:budget=12,floor_percent=25",
    "batchmax": "batchmax:budget=14,block=5",
    "batchmax in decode": "batchmax:budget=14,block=5,decode_only=1",
    "keydiff": "keydiff:budget=13,block=3",
    "roco": "roco:budget=14,block=4,sinks=2,spread=3",
}


SHAPES = {"plain": {"cut": 3, "num_layers": 3}, "swiftkv": {"cut": 1}}


def make_session(policy: str, shape: str):
    scorer = 16 if Need.TOKEN_SCORES in parse(policy).needs else None
    return small_session({"kv_policy": policy}, **{"head_dim": 10, "kv_scorer": scorer, **SHAPES[shape]})


def alone(session, request, index):
    engine = LLMEngine(session=session, num_pages=32, enable_prefix_cache=False)
    kept = KeptSets(engine)
    engine.add_request("alone", request.prompt, dataclasses.replace(request.params, n=1))
    tokens, reason = [], None
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
            reason = output.finish_reason
        engine.check_invariants()
    return (tokens, reason), kept.of("alone", 0)


CASES = [
    (rule, shape)
    for rule in RULES
    for shape in SHAPES
    if shape == "plain" or Need.ALL_QUERIES not in parse(RULES[rule]).needs
]


@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_texts_and_kept_tokens_over_schedules_equal_those_alone(rule, shape, seeds, full):
    policy = parse(RULES[rule])
    session, counts = make_session(RULES[rule], shape), Counter()
    for seed in seeds(8, 200):
        rng = random.Random(seed)
        plan = random_plan(seed, page_sizes=(4,), vocab_size=96, max_requests=5, sampled=False)
        expected, sets = {}, {}
        for request in plan.requests:
            text, kept = alone(session, request, 0)
            for index in range(request.params.n):
                expected[request.request_id, index] = text
                sets[request.request_id, index] = kept
        most = max(
            -(-policy.max_cached(len(r.prompt), len(r.prompt) + r.params.max_tokens) // 4) for r in plan.requests
        )
        engine = LLMEngine(
            session=session,
            num_pages=most + rng.choice([0, 1, 3, 8]),
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
        )
        for pool in engine.runner.pools:
            for tensor in pool:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 99)
        kept = KeptSets(engine)
        tokens, reasons, aborted = run_plan(engine, plan)
        check_tokens(tokens, reasons, aborted, expected, seed)
        for key, found in kept.all().items():
            assert found == {p: sets[key][p] for p in found}, (seed, key)
        stats = engine.stats()
        assert stats["num_used_pages"] == stats["num_used_state_pages"] == 0 == stats["num_failed_steps"]
        counts.update(
            evictions=stats["num_evictions"], preempted=stats["num_preemptions"], reused=stats["num_reused_tokens"]
        )
    print(counts)
    assert counts["evictions"] > (5 if full else 1) and counts["preempted"] > (2 if full else 0), counts
