"""Whatever a drafter does, tokens are those of decoding without one: random schedules with every kind of drafter."""

import random
from collections import Counter

import pytest

from kvforge.runtime import LLMEngine
from kvforge.runtime.config import resolve_config
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_model import DraftModel
from tests.support.schedules.drafters import KINDS, AdversarialDrafter, RandomLengths
from tests.support.schedules.engine_schedules import alone, check_tokens, random_plan, run_plan
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
MEMORY = 1
"""Tokens that the fake model's next one depends on: its texts run into loops."""


def draft_model(rng):
    """One whose model is the target or another, with room for few sequences or many."""
    session = FakeSession(seed=rng.choice([0, 0, 1]), memory=MEMORY, page_size=rng.choice([2, 4]))
    limits = dict(num_pages=rng.choice([16, 40, 300]), max_num_tokens=rng.choice([2, 16, 64]), max_seq_len=64)
    limits["num_pages"] = max(limits["num_pages"], 64 // session.manifest.page_size)
    return DraftModel(session, resolve_config(session.manifest, 0, **limits))


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "adversary"])
def test_tokens_equal_plain_decoding(method, seeds, full, caplog):
    counts, kinds = Counter(), Counter()
    for seed in seeds(40, 200):
        rng = random.Random(seed)
        plan, expected = random_plan(seed), alone(seed, MEMORY)
        longest = rng.choice([1, 3, 7])
        least = rng.randint(1, 2)
        max_tokens = rng.choice([5, 40, 1000])
        suffix = SpeculativeConfig("suffix", longest, suffix_sharing="all", suffix_max_tokens=max_tokens)
        session = FakeSession(page_size=plan.page_size, memory=MEMORY, max_draft_len=longest + rng.choice([0, 2]))
        engine = LLMEngine(
            session=session,
            num_pages=plan.num_pages,
            max_num_tokens=plan.max_num_tokens,
            max_num_seqs=plan.max_num_seqs,
            enable_prefix_cache=plan.enable_prefix_cache,
            speculative=suffix
            if method == "suffix"
            else SpeculativeConfig("ngram", longest, prompt_lookup_min=least, prompt_lookup_max=least + 1),
        )
        drafting = engine.drafting
        if method in ("draft_model", "adversary"):
            adversary = method == "adversary"
            drafting.drafter = AdversarialDrafter(rng, expected) if adversary else draft_model(rng)
            drafting._is_free = adversary and rng.random() < 0.5
        if rng.random() < 0.7:
            drafting._lengths = RandomLengths(rng, longest)
        scheduler = engine.scheduler

        def after_step(session=session, scheduler=scheduler):
            session.poison_pages(scheduler.pool.free_pages)
            assert not scheduler.drafts.proposals and not scheduler.drafts.limits

        tokens, reasons, aborted = run_plan(engine, plan, after_step)
        assert session.max_tokens_seen <= plan.max_num_tokens
        check_tokens(tokens, reasons, aborted, expected, seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_free_pages"] == plan.num_pages
        assert stats["num_failed_steps"] == 0 and not drafting._drafts
        assert not getattr(drafting._lengths, "_rates", None)
        if method == "ngram":
            assert not drafting.drafter._indices
        elif method == "suffix":
            assert not drafting.drafter._lookup._indices
            assert 0 < stats["suffix_num_tokens"] <= max_tokens
        elif method == "draft_model":
            drafting.drafter.check_invariants()
            assert drafting.drafter.stats()["draft_model_num_used_pages"] == 0
        else:
            assert {key for key in drafting.drafter.forgotten} >= reasons.keys()
            kinds.update(drafting.drafter.num_calls)
        failures = [record for record in caplog.records if "drafter failed" in record.message]
        assert len(failures) <= (method == "adversary"), "a failing drafter is logged once"
        caplog.clear()
        counts.update(
            preempted=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            accepted=stats["num_accepted_draft_tokens"],
            rejected=stats["num_draft_tokens"] - stats["num_accepted_draft_tokens"],
            aborted=len(aborted),
        )
    # The schedules exercise what they claim to.
    assert counts["preempted"] > (10 if full else 3) and counts["aborted"] > (5 if full else 1), counts
    assert min(counts[name] for name in ("reused", "accepted", "rejected")) > (50 if full else 8), counts
    assert method != "adversary" or min(kinds[kind] for kind in KINDS) > 10, kinds
