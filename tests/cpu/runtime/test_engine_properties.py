"""Greedy tokens of compiled engines do not depend on the batch, the chunks, the pages or the neighbours."""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvforge.common.hardware import best_isa
from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.sessions.session import Session, load_session
from kvforge.runtime.speculation.config import SpeculativeConfig
from tests.support.models.engines import (
    AWKWARD,
    INT4_WEIGHTS,
    INT8_WEIGHTS,
    PLAIN_INT4,
    PLAIN_INT4_WEIGHTS,
    SWIFTKV,
    SWIFTKV_BF16,
    SWIFTKV_FP8,
    SWIFTKV_INT4,
    SWIFTKV_K8V4,
    EngineSpec,
)
from tests.support.models.shelf import EngineShelf
from tests.support.random_cases import Seeds
from tests.support.schedules.drafters import AdversarialDrafter, RandomLengths
from tests.support.schedules.engine_schedules import Plan, PlannedRequest, random_plan, run_plan
from tests.support.sessions.eager import eager_session

NUM_SCHEDULES = 200
EXPERTS = EngineSpec(
    "qwen3_moe",
    cut=1,
    group_size=2,
    bfloat16=True,
    options=SWIFTKV.options,
    model=(("num_hidden_layers", 4), ("decoder_sparse_step", 2), ("norm_topk_prob", True)),
)
"""A mixture of experts in every second layer, in bf16."""

PLAIN_EXPERTS_INT8 = EngineSpec(
    "mixtral", bfloat16=True, options=INT8_WEIGHTS.options, model=(("num_hidden_layers", 2),)
)
"""The other family of these, without a cut and with int8 weights."""

LOCAL_ROTATIONS = EngineSpec(
    "gemma3_text",
    cut=3,
    group_size=2,
    bfloat16=True,
    options=SWIFTKV.options,
    model=(("num_hidden_layers", 5), ("sliding_window_pattern", 3), ("sliding_window", 10)),
)
"""Layers with and without a window, whose heads rotate otherwise, in bf16."""

SHARED_CACHES = EngineSpec(
    "gemma4_text",
    bfloat16=True,
    options=SWIFTKV.options,
    model=(
        ("num_hidden_layers", 5),
        ("layer_types", ["sliding_attention", "full_attention"] * 2 + ["full_attention"]),
        ("num_kv_shared_layers", 3),
        ("sliding_window", 10),
    ),
)
"""Two layers whose caches the three above them read, heads of two sizes, in bf16."""

SINKS = EngineSpec(
    "gpt_oss",
    cut=2,
    group_size=2,
    bfloat16=True,
    options=SWIFTKV.options,
    model=(("num_hidden_layers", 4), ("sliding_window", 10), ("swiglu_limit", 0.7)),
)
"""Heads with sinks, and experts with biases and gates of their own, in bf16."""

LATENTS = EngineSpec(
    "deepseek_v2",
    cut=2,
    group_size=2,
    bfloat16=True,
    options=SWIFTKV.options,
    model=(
        ("num_hidden_layers", 4),
        ("q_lora_rank", 24),
        ("topk_method", "group_limited_greedy"),
        ("n_group", 4),
        ("topk_group", 2),
    ),
)
"""Latent attention with a latent of queries, experts in groups and shared ones, in bf16."""

SIGMOIDS, UNROTATED, NORMS_AFTER = (
    EngineSpec(family, 2, 2, bfloat16=True, options=SWIFTKV.options, model=(("num_hidden_layers", 5), *more))
    for family, *more in (
        ("deepseek_v3", ("q_lora_rank", 24)),
        ("smollm3",),
        ("olmo3", ("num_attention_heads", 6), ("sliding_window", 10)),
    )
)
"""Experts by sigmoids in groups; a layer without rotation in a group; norms behind layers and windows; in bf16."""

STATES = EngineSpec("qwen3_next", cut=2, bfloat16=True, options=SWIFTKV.options, model=(("num_hidden_layers", 4),))
"""Linear attention in three of four layers, one of them above the cut, and experts, in bf16."""

pytestmark = pytest.mark.usefixtures("one_thread")


class CountingSession(Session):
    """A session that counts what the runtime calls, and the survivors it asks for."""

    def __init__(self, session: Session) -> None:
        self.session, self.manifest = session, session.manifest
        self.calls: Counter[str] = Counter()

    def allocate_pools(self, *counts):
        return self.session.allocate_pools(*counts)

    def lower(self, step, pools):
        self.calls["lower"] += 1
        return self.session.lower(step, pools)

    def upper(self, step, pools):
        assert len(step.survivor_index) > 0, "a step without survivors ran upper"
        self.calls["upper"] += 1
        return self.session.upper(step, pools)

    def verify(self, step):
        return self.session.verify(step)


def load(directory) -> CountingSession:
    return CountingSession(load_session(directory, load_manifest(directory)))


def short_plan(seed: int) -> Plan:
    return random_plan(seed, page_sizes=(8,), vocab_size=320, max_prompt=48, max_new=12, max_requests=7, sampled=False)


def alone(
    engine: LLMEngine, request: PlannedRequest, logprobs: int | None = None
) -> tuple[list[int], str, list[dict[int, float]]]:
    """Tokens and the end of one sequence alone, and the log-probabilities of the ``logprobs`` most probable tokens."""
    engine.add_request("alone", request.prompt, dataclasses.replace(request.params, n=1, logprobs=logprobs))
    tokens: list[int] = []
    top: list[dict[int, float]] = []
    reason = ""
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.new_token_ids
            top += [entry.top for entry in output.logprobs or ()]
            reason = output.finish_reason
    return tokens, reason, top


def compare(
    session: CountingSession, schedules: Sequence[int], max_drafts: int = 0, **snapshots: Any
) -> tuple[int, int, list[float], Counter[str]]:
    """Run schedules with ``snapshots``, and drafts of every kind; returns (sequences equal, different, gap at each
    first difference, counts).

    The gap is how much less probable the token of the schedule is than the most probable one, alone: at least
    that of the top two.
    """
    lonely = LLMEngine(session=session, num_pages=16, enable_prefix_cache=False)
    num_equal, gaps, counts = 0, [], Counter()
    for seed in schedules:
        plan, rng = short_plan(seed), random.Random(seed)
        wanted = {request.request_id: alone(lonely, request) for request in plan.requests}
        engine = LLMEngine(
            session=session,
            num_pages=plan.num_pages,
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            speculative=SpeculativeConfig("ngram", max_drafts) if max_drafts else None,
            **plan.prefixes(**snapshots),
        )
        if max_drafts:
            sequences = {(each.request_id, n): wanted[each.request_id] for each in plan.requests for n in range(9)}
            engine.drafting.drafter = AdversarialDrafter(rng, sequences)
            engine.drafting._lengths = RandomLengths(rng, max_drafts)
        session.calls.clear()
        tokens, reasons, aborted = run_plan(engine, plan)
        stats = engine.stats()
        assert session.calls["upper"] == stats["num_upper_calls"] <= session.calls["lower"] == stats["num_iterations"]
        assert stats["num_used_pages"] == 0 and stats["num_free_pages"] == plan.num_pages
        assert stats["num_failed_steps"] == 0
        counts.update(
            preemptions=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            aborted=len(aborted),
            skipped=session.calls["lower"] - session.calls["upper"],
            accepted=stats["num_accepted_draft_tokens"],
            rejected=stats["num_draft_tokens"] - stats["num_accepted_draft_tokens"],
        )
        for request in plan.requests:
            expected, reason, _ = wanted[request.request_id]
            for index in range(request.params.n):
                key = (request.request_id, index)
                got = tokens.get(key, [])
                differs = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
                if differs is not None:
                    again, _, tops = alone(lonely, request, logprobs=5)
                    assert again == expected, (seed, key)
                    top = tops[differs]
                    assert got[differs] in top, (seed, key, "not one of the five most probable tokens")
                    gaps.append(max(top.values()) - top[got[differs]])
                    continue
                num_equal += 1
                if request.request_id not in aborted:
                    assert (len(got), reasons[key]) == (len(expected), reason), (seed, key)
    return num_equal, len(gaps), gaps, counts


@pytest.mark.parametrize(
    "spec, num_schedules",
    [(SWIFTKV, NUM_SCHEDULES), (AWKWARD, 60), (SWIFTKV_FP8, 60)],
    ids=["swiftkv", "awkward", "fp8 cache"],
)
def test_fp32_tokens_equal_one_at_a_time(engines: EngineShelf, spec: EngineSpec, num_schedules: int) -> None:
    """With an 8-bit cache too: a token's scale depends on that token alone."""
    num_equal, num_different, gaps, counts = compare(load(engines.engine(spec)), range(num_schedules))
    assert num_different == 0, gaps
    assert num_equal > 4 * num_schedules
    assert min(counts[name] for name in ("preemptions", "reused", "aborted", "skipped")) > num_schedules // 20, counts


@pytest.mark.with_full(spec=(PLAIN_INT4, PLAIN_INT4_WEIGHTS))
@pytest.mark.parametrize(
    "spec",
    [INT8_WEIGHTS, INT4_WEIGHTS, PLAIN_INT4_WEIGHTS, SWIFTKV_INT4, SWIFTKV_K8V4, PLAIN_INT4],
    ids=["int8", "int4", "int4, no cut", "4-bit cache", "8-bit keys, 4-bit values", "4-bit cache, no cut"],
)
def test_packed_weights_give_the_tokens_of_one_at_a_time(
    spec: EngineSpec, engines: EngineShelf, engines_compiled_with_full: EngineShelf, seeds: Seeds
) -> None:
    """Packed weights, activations quantized row by row, and a cache of 4 bits, where a token's bytes are its own alone:
    no other row has a part in a row's bits. Without --full int4 weights alone are compiled."""
    shelf = engines if spec == INT4_WEIGHTS else engines_compiled_with_full
    num_equal, num_different, gaps, counts = compare(load(shelf.engine(spec)), schedules := seeds(60, NUM_SCHEDULES))
    print(f"\n{len(schedules)} schedules, {num_equal} sequences equal, {num_different} different; {dict(counts)}")
    assert num_different == 0 or (spec.options.kv_dtype in ("int4", "k8v4") and best_isa() == "portable"), gaps
    assert num_equal > 4 * len(schedules)
    assert min(counts[name] for name in ("preemptions", "reused", "aborted", "skipped")) > len(schedules) // 60, counts


@pytest.mark.parametrize(
    "spec",
    [
        EXPERTS,
        PLAIN_EXPERTS_INT8,
        LOCAL_ROTATIONS,
        SHARED_CACHES,
        SINKS,
        LATENTS,
        SIGMOIDS,
        UNROTATED,
        NORMS_AFTER,
        STATES,
    ],
    ids=[
        "experts",
        "experts, int8, no cut",
        "local rotations",
        "shared caches",
        "sinks",
        "latents",
        "sigmoids",
        "unrotated",
        "norms after",
        "states",
    ],
)
def test_other_layers_give_the_tokens_of_one_at_a_time(
    spec: EngineSpec, engines: EngineShelf, full: bool, seeds: Seeds
) -> None:
    """Which experts the neighbours go to has no part in a token's bits, nor has a window. Compiled with --full; else,
    in fewer schedules, the graphs as torch runs them."""
    if full:
        session = load(engines.engine(spec))
    else:
        session = CountingSession(eager_session(engines.checkpoint(spec), spec.options))
    snapshots = {"snapshot_every": 1, "num_snapshots": 12} if session.manifest.state_bytes else {}
    num_equal, num_different, gaps, counts = compare(session, schedules := seeds(60, NUM_SCHEDULES), **snapshots)
    print(f"\n{len(schedules)} schedules, {num_equal} sequences equal, {num_different} different; {dict(counts)}")
    assert num_different == 0 or best_isa() == "portable", gaps
    assert num_equal > 4 * len(schedules)
    assert min(counts[name] for name in ("preemptions", "reused", "aborted", "skipped")) > len(schedules) // 60, counts


def test_bf16_differs_only_at_near_ties(engines: EngineShelf) -> None:
    """And nowhere where linear layers are packed."""
    session = load(engines.engine(SWIFTKV_BF16))
    num_equal, num_different, gaps, _ = compare(session, range(NUM_SCHEDULES))
    print(
        f"\nbf16: {num_equal} of {num_equal + num_different} sequences equal one-at-a-time; gap at the first "
        f"difference: {', '.join(f'{gap:.4f}' for gap in sorted(gaps)) or 'none'}"
    )
    assert num_different == 0 or best_isa() == "portable"
    assert all(gap < 0.1 for gap in gaps), "a difference that is no near-tie"
    assert num_equal > 0.9 * (num_equal + num_different)


def test_one_token_and_one_sequence(engines: EngineShelf) -> None:
    """T = S = R = M = 1: the smallest step there is."""
    session = load(engines.engine(AWKWARD))
    engine = LLMEngine(session=session, num_pages=1, max_num_tokens=1, max_num_seqs=1)
    request = PlannedRequest("one", [7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), 0, None)
    tokens = alone(engine, request)[0]
    roomy = alone(LLMEngine(session=session, num_pages=16), request)[0]
    assert tokens == roomy
    assert len(tokens) == 8, "8 positions hold 9 tokens: the last one's K,V are never written"
