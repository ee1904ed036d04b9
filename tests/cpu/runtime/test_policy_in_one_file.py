"""A policy defined outside the product, in one file, is built, planned, scheduled and accounted like any other."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.kv_policies import parse, policies
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.config import resolve_config
from tests.support.extensions.forgetting_policy import Forgetting
from tests.support.models.checkpoints import make_checkpoint
from tests.support.rounding import assert_near, model_error
from tests.support.schedules.engine_schedules import random_plan, run_plan
from tests.support.sessions.eager import eager_session
from tests.support.sessions.fake import FakeSession, context_logits

SMALL = Forgetting(num_sinks=4, window=8, block=4)
GREEDY = {"temperature": 0.0, "ignore_eos": True}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(policies(), Forgetting.name, Forgetting)


class ForgettingSession(FakeSession):
    """Tokens depend on all that the policy lets them see, and nothing else."""

    def __init__(self, policy, **changes):
        super().__init__(kv_policy=policy.name, kv_policy_parameters=policy.parameters, **changes)
        self.policy = policy

    def lower(self, step, pools):
        last = step.positions[step.query_start[1:].long() - 1]
        self._shifts = (step.kv_length - 1 - last).tolist()
        return super().lower(step, pools)

    def shifts(self, state, num_seqs):
        assert state == ()
        return self._shifts

    def context(self, s, end, page_table, pools, state):
        visible = self.policy.visible(end - 1)
        assert self._shifts[s] == len(visible) - end or self._shifts[s] == 0 == len(visible) - end
        pages = page_table[s, : -(-len(visible) // self.manifest.page_size)].long()
        context = pools[0][0][pages].reshape(-1, 2)[: len(visible)]
        assert context[:, 1].tolist() == visible, "other tokens than the policy's"
        assert torch.equal(pools[1][0][pages].reshape(-1, 2)[: len(visible)], context.flip(-1))
        return context


def brute_force(policy, prompt, params):
    """(tokens, reason) of one sequence, from lists alone."""
    tokens, reason = list(prompt), "length"
    for _ in range(params.max_tokens):
        seen = [tokens[position] for position in policy.visible(len(tokens) - 1)]
        tokens.append(int(np.argmax(context_logits(seen, 0, 64))))
        if tokens[-1] == 2 and not params.ignore_eos:
            reason = "stop"
            break
    return tokens[len(prompt) :], reason


@pytest.mark.parametrize("block", range(4))
def test_tokens_equal_brute_force_on_random_schedules(block, seeds, full):
    """Preemption, shared prefixes, chunks, priorities, cancellations, down to the fewest pages for one sequence."""
    counts = Counter()
    for seed in seeds(80, 400)[block::4]:
        plan = random_plan(seed, page_sizes=(1, 2, 4), max_prompt=60, max_new=40, sampled=False)
        rng, most = random.Random(seed), -(-SMALL.limit // plan.page_size)
        session = ForgettingSession(SMALL, page_size=plan.page_size)
        engine = LLMEngine(
            session=session,
            num_pages=most + rng.choice([0, 1, 3, 2 * most, 6 * most]),
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
        )
        pool = engine.scheduler.pool
        tokens, reasons, aborted = run_plan(engine, plan, lambda s=session, p=pool: s.poison_pages(p.free_pages))
        for request in plan.requests:
            wanted, reason = brute_force(SMALL, request.prompt, request.params)
            for index in range(request.params.n):
                key = (request.request_id, index)
                got = tokens.get(key, [])
                if request.request_id in aborted and key not in reasons:
                    assert got == wanted[: len(got)], (seed, key)
                else:
                    assert (got, reasons[key]) == (wanted, reason), (seed, key)
        stats = engine.stats()
        assert stats["num_used_pages"] == stats["num_failed_steps"] == stats["num_compacted"] == 0
        counts.update(
            transitions=stats["num_transitions"], preempted=stats["num_preemptions"],
            reused=stats["num_reused_tokens"], aborted=len(aborted),
        )  # fmt: skip
    assert counts["transitions"] > (125 if full else 50) and min(counts.values()) > (5 if full else 1), counts


def test_sequences_longer_than_the_pool():
    """What is forgotten frees its pages: a pool of one full window serves prompts of any length."""
    session = ForgettingSession(SMALL, page_size=4)
    engine = LLMEngine(session=session, num_pages=SMALL.limit // 4, max_num_tokens=8)
    prompt = [3 + index % 40 for index in range(100)]
    params = SamplingParams(max_tokens=20, **GREEDY)
    engine.add_request("long", prompt, params)
    tokens, most = [], 0
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
        most = max(most, engine.stats()["num_used_pages"])
        engine.check_invariants()
    assert tokens == brute_force(SMALL, prompt, params)[0]
    assert most == SMALL.limit // 4


def test_memory_is_accounted():
    manifest = ForgettingSession(SMALL, page_size=4).manifest
    config = resolve_config(manifest, 0)
    assert config.num_pages == manifest.max_num_seqs * SMALL.limit // 4  # not those of max_seq_len
    assert config.pages_needed(100, 120) == (SMALL.limit // 4, 0)
    assert config.pages_needed(3, 9) == (3, 0)
    cache = manifest.owner_cache
    for computed in range(80):
        pages = -(-SMALL.num_cached(computed, computed) // 4)
        assert SMALL.device_bytes(cache, computed) == pages * 4 * cache.token_bytes


@pytest.mark.parametrize("seed", range(3))
def test_logits_equal_those_of_transformers_with_a_mask(tmp_path, seed):
    """Of every generated token, whatever the chunks, with several sequences in fewer pages than they ask for."""
    rng = random.Random(seed)
    checkpoint = make_checkpoint(tmp_path, "llama", seed=seed, num_hidden_layers=3)
    policy = Forgetting(num_sinks=8, window=rng.choice([8, 24]), block=8)
    limits = {"max_num_seqs": 4, "max_num_tokens": rng.choice([16, 64]), "max_seq_len": 256}
    session = eager_session(checkpoint, BuildOptions(dtype="float32", page_size=8, kv_policy=str(policy), **limits))
    engine = LLMEngine(session=session, num_pages=policy.limit // 8 + 2)
    prompts = [[rng.randrange(3, 300) for _ in range(count)] for count in (5, 6, 7, 60, 131)]
    prompts.append(prompts[4][:70] + prompts[0])
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, SamplingParams(max_tokens=30, return_logits=True, **GREEDY))
    tokens, logits = [[] for _ in prompts], [[] for _ in prompts]
    while engine.has_unfinished():
        for output in engine.step():
            tokens[int(output.request_id)] += output.new_token_ids
            logits[int(output.request_id)] += output.logits
    assert engine.scheduler.num_preemptions > 0
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    for prompt, generated, rows in zip(prompts, tokens, logits, strict=True):
        ids = torch.tensor([prompt + generated[:-1]])
        mask = torch.full((1, 1, ids.shape[1], ids.shape[1]), torch.finfo(torch.float32).min)
        for position in range(ids.shape[1]):
            mask[0, 0, position, policy.visible(position)] = 0.0
        with torch.inference_mode():
            want = model(ids, attention_mask=mask).logits[0, len(prompt) - 1 :]
        got = torch.from_numpy(np.stack(rows))
        assert_near(got, want, model_error(session.config, ids.shape[1]))


@pytest.mark.usefixtures("compiled_with_full")
def test_an_engine_is_built_with_it(tmp_path):
    """By its text, into a manifest that names it; loaded, it generates what the graphs without compilation do."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama", seed=5, num_hidden_layers=2)
    options = BuildOptions(
        dtype="float32",
        page_size=8,
        kv_policy="forgetting:num_sinks=8",
        max_num_seqs=4,
        max_num_tokens=64,
        max_seq_len=256,
    )
    build_engine(checkpoint, tmp_path / "engine", options)
    manifest = json.loads((tmp_path / "engine" / "engine.json").read_text())
    assert (manifest["kv_policy"], manifest["kv_policy_parameters"]) == ("forgetting", Forgetting().parameters)
    prompt, params = [7 + index % 90 for index in range(100)], SamplingParams(max_tokens=16, **GREEDY)
    results = []
    for engine in (LLMEngine(tmp_path / "engine"), LLMEngine(session=eager_session(checkpoint, options))):
        engine.add_request("0", prompt, params)
        while engine.has_unfinished():
            results.append([output.new_token_ids for output in engine.step()])
    assert results[: len(results) // 2] == results[len(results) // 2 :]


def test_what_is_wrong_with_it_is_said():
    with pytest.raises(BuildError, match="forgetting: window 12 is no multiple of --page-size 8"):
        Forgetting(window=12).check(1, 1, 8)
    with pytest.raises(BuildError, match="forgetting: block is 0; give at least 1"):
        parse("forgetting:block=0")
