"""Drafts change how many tokens a step gives, never which: any drafts, at any step, of any sequence. Nor do priorities
of pages."""

import dataclasses
import random
from collections import Counter

import pytest

from kvforge.runtime import LLMEngine
from tests.support.schedules.engine_schedules import alone, check_tokens, random_plan, run_plan
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_SCHEDULES = 200
VOCAB = 64


def guess(rng, future):
    """Drafts of a text that goes on with ``future``: all right, right up to some place, wrong, or beyond its end."""
    kind = rng.choice(["right", "partly", "wrong", "beyond"])
    if kind == "right":
        return tuple(future[: rng.randint(0, len(future))])
    if kind == "wrong":
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))
    right = future[: rng.randint(0, len(future))] if kind == "partly" else future
    return (*right, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))))


def with_drafts(plan, rng, expected, longest):
    """The plan with drafts of each request's first tokens, at most ``longest``, and pages of different priorities."""
    requests = []
    for request in plan.requests:
        drafts = guess(rng, expected[request.request_id, 0][0])[:longest]
        starts = rng.sample(range(40), rng.randint(0, 3))
        retention = [(start, rng.choice([-1, start + rng.randint(1, 9)]), rng.randint(0, 100)) for start in starts]
        params = dataclasses.replace(request.params, draft_token_ids=drafts, retention=retention)
        requests.append(dataclasses.replace(request, params=params))
    return dataclasses.replace(plan, requests=requests)


@pytest.mark.parametrize("block", range(4))
def test_tokens_equal_plain_decoding(block):
    counts = Counter()
    for seed in range(block, NUM_SCHEDULES, 4):
        rng = random.Random(seed)
        plan, expected = random_plan(seed), alone(seed)
        session = FakeSession(page_size=plan.page_size, max_draft_len=rng.choice([0, 1, 3, 7]))
        engine = LLMEngine(
            session=session,
            num_pages=plan.num_pages,
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
        )
        longest = min(plan.max_num_tokens, engine.config.max_num_survivors) - 1
        plan = with_drafts(plan, rng, expected, longest)
        scheduler = engine.scheduler

        def after_step(session=session, scheduler=scheduler, rng=rng, expected=expected):
            session.poison_pages(scheduler.pool.free_pages)
            for sequence in scheduler.running + scheduler.waiting:
                if sequence.num_generated > 0 and rng.random() < 0.5:
                    future = expected[sequence.request_id, sequence.index][0][sequence.num_generated :]
                    scheduler.propose(sequence, guess(rng, future))

        tokens, reasons, aborted = run_plan(engine, plan, after_step)
        assert session.max_tokens_seen <= plan.max_num_tokens
        check_tokens(tokens, reasons, aborted, expected, seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_free_pages"] == plan.num_pages
        assert stats["num_failed_steps"] == 0 and not scheduler.drafts.proposals
        assert 0 <= stats["num_accepted_draft_tokens"] <= stats["num_draft_tokens"]
        counts.update(
            preempted=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            accepted=stats["num_accepted_draft_tokens"],
            rejected=stats["num_draft_tokens"] - stats["num_accepted_draft_tokens"],
            aborted=len(aborted),
        )
    # The schedules exercise what they claim to.
    assert min(counts[name] for name in ("preempted", "aborted")) > 10, counts
    assert min(counts[name] for name in ("reused", "accepted", "rejected")) > 500, counts
