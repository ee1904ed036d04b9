"""Drafts on compiled engines: the tokens of plain decoding, in fewer steps."""

import dataclasses
import random

import pytest

from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.sessions.session import load_session
from tests.support.models.engines import (
    INT4_WEIGHTS,
    PLAIN,
    PLAIN_INT4,
    PLAIN_INT4_WEIGHTS,
    SWIFTKV,
    SWIFTKV_FP8,
    SWIFTKV_INT4,
    EngineSpec,
)
from tests.support.models.shelf import EngineShelf
from tests.support.random_cases import Seeds
from tests.support.schedules.engine_schedules import random_plan, run_plan

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_text(engine, prompt, params):
    engine.add_request("alone", prompt, dataclasses.replace(params, n=1, draft_token_ids=()))
    tokens = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    return tokens


@pytest.mark.with_full(spec=(PLAIN_INT4, INT4_WEIGHTS, PLAIN_INT4_WEIGHTS))
@pytest.mark.parametrize(
    "spec",
    [SWIFTKV, PLAIN, SWIFTKV_FP8, SWIFTKV_INT4, PLAIN_INT4, INT4_WEIGHTS, PLAIN_INT4_WEIGHTS],
    ids=["swiftkv", "no cut", "fp8 cache", "4-bit cache", "4-bit cache, no cut", "int4", "int4, no cut"],
)
def test_schedules_with_drafts_give_plain_tokens(
    engines: EngineShelf, engines_compiled_with_full: EngineShelf, spec: EngineSpec, full: bool, seeds: Seeds
) -> None:
    """In fp32, and in bf16 with a cache or weights of 4 bits; greedy and seeded. A drawn number may lie within rounding
    of the boundary between two tokens, which then are neighbours: as rare as it is with other chunks instead of drafts,
    and never in greedy decoding."""
    shelf = engines_compiled_with_full if spec == SWIFTKV_INT4 else engines
    directory = shelf.engine(spec)
    session = load_session(directory, load_manifest(directory))
    lonely = LLMEngine(session=session, num_pages=16, enable_prefix_cache=False)
    num_accepted = num_rejected = num_preempted = num_equal = num_boundaries = 0
    for seed in seeds(12, 200):
        rng = random.Random(seed)
        limits = dict(page_sizes=(8,), vocab_size=320, max_prompt=48, max_new=12, max_requests=5, sampled=False)
        plan = random_plan(seed, **limits)
        expected, sampled = {}, {}
        for planned in plan.requests:
            params = planned.params
            if rng.random() < 0.4:
                params = dataclasses.replace(params, temperature=0.9, seed=seed, n=1, presence_penalty=0.3)
            sampled[planned.request_id] = not params.greedy
            text = expected[planned.request_id] = plain_text(lonely, planned.prompt, params)
            drafts = [token if rng.random() < 0.9 else 5 for token in text] + [6] * rng.randint(0, 3)
            most = min(plan.max_num_tokens, 64) - 1
            planned.params = dataclasses.replace(params, draft_token_ids=drafts[: rng.randint(0, most)])
        engine = LLMEngine(
            session=session,
            num_pages=plan.num_pages,
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
        )
        scheduler = engine.scheduler

        def propose(scheduler=scheduler, rng=rng, expected=expected):
            for sequence in scheduler.running:
                if sequence.num_generated > 0 and rng.random() < 0.4:
                    future = expected[sequence.request_id][sequence.num_generated :]
                    scheduler.propose(sequence, (*future[: rng.randint(0, 4)], *[7] * rng.randint(0, 2)))

        tokens, _, aborted = run_plan(engine, plan, after_step=propose)
        for (request_id, index), got in tokens.items():
            text = expected[request_id][: len(got)] if request_id in aborted else expected[request_id]
            differing = [abs(a - b) for a, b in zip(got, text, strict=False) if a != b]
            if differing and sampled[request_id]:
                assert differing[0] == 1, (seed, request_id, got, text)
                num_boundaries += 1
            else:
                assert got == text, (seed, request_id, index)
                num_equal += 1
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_failed_steps"] == 0
        num_accepted += stats["num_accepted_draft_tokens"]
        num_rejected += stats["num_draft_tokens"] - stats["num_accepted_draft_tokens"]
        num_preempted += stats["num_preemptions"]
    print(
        f"\n{len(seeds(12, 200))} schedules, {num_equal} sequences equal, {num_boundaries} at a drawn boundary; "
        f"{num_accepted} drafts accepted, {num_rejected} rejected, {num_preempted} preemptions"
    )
    assert num_boundaries <= num_equal // 50
    assert (
        num_accepted > (30 if full else 10) and num_rejected > (15 if full else 4) and (num_preempted > 10 or not full)
    )


def test_a_right_draft_of_63_tokens_takes_one_step(engines: EngineShelf) -> None:
    """As many as go past the cut in one step of an engine for 64 sequences and no drafts."""
    engine = LLMEngine(engines.engine(SWIFTKV), num_pages=32)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    text = plain_text(engine, [5, 6, 7], params)
    steps = engine.stats()["num_iterations"]
    engine.add_request("drafted", [5, 6, 7], dataclasses.replace(params, draft_token_ids=text[:63]))
    (output,) = engine.step()
    assert output.new_token_ids == text and output.finished and steps == 64
