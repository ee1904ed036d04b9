"""With ShadowKV, tokens do not depend on who else is served, how prompts are cut, or where pages lie, and all pages
come back."""

import dataclasses
import random
from collections import Counter

import pytest

from kvforge.runtime import LLMEngine
from tests.support.schedules.engine_schedules import alone, check_tokens, random_plan, run_plan
from tests.support.sessions.fake_shadow import POLICY, FakeShadowSession

RETENTIONS = ((), (), ((0, -1, 80),), ((0, 7, 90), (5, 20, 10)))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("block", range(2))
def test_tokens_equal_those_of_exact_pages_one_at_a_time(block, seeds, full):
    counts = Counter()
    for seed in seeds(72, 300)[block::2]:
        rng = random.Random(seed)
        # Its sequences' tokens alone, in exact pages, do not depend on the size of the pages.
        plan = dataclasses.replace(random_plan(seed), page_size=rng.choice([2, 4, 8]))
        plan.requests = [
            dataclasses.replace(request, params=dataclasses.replace(request.params, retention=rng.choice(RETENTIONS)))
            for request in plan.requests
        ]
        longest = -(-40 // plan.page_size)
        session = FakeShadowSession(page_size=plan.page_size)
        engine = LLMEngine(
            session=session,
            num_pages=longest + rng.choice([0, 0, 1, 3, 2 * longest]),
            num_state_pages=longest * rng.choice([1, 2, 8]) + rng.randint(0, 3),
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
        )
        scheduler, factored = engine.scheduler, set()

        def after_step(session=session, scheduler=scheduler, factored=factored):
            factored.update((s.request_id, s.index) for s in scheduler.running if s.cache_offset < 0)
            session.poison_pages(scheduler.pool.free_pages)
            session.poison_shadow_pages(scheduler.state_pages.free_pages, scheduler.slots.free_slots)

        tokens, reasons, aborted = run_plan(engine, plan, after_step)
        check_tokens(tokens, reasons, aborted, alone(seed), seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == stats["num_used_state_pages"] == stats["num_compacted"] == 0
        assert stats["num_failed_steps"] == 0
        counts.update(
            factored=stats["num_transitions"],
            rows=session.num_factored_rows,
            again=stats["num_transitions"] - len(factored),
            short=sum(not POLICY.is_factored(len(request.prompt)) for request in plan.requests),
            preempted=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            aborted=len(aborted),
            selected=stats["num_selected_chunks"],
            chunks_reused=stats["num_reused_chunks"],
        )
    # The schedules exercise what they claim to.
    rows, factored, reused, others = (500, 50, 150, 4) if full else (200, 20, 50, 1)
    assert counts["rows"] > rows and counts["factored"] > factored and counts["reused"] > reused, counts
    assert counts["selected"] > counts["chunks_reused"] > rows, counts
    assert min(counts[name] for name in ("again", "short", "preempted", "aborted")) > others, counts
