"""Tokens do not depend on who else is served, how prompts are cut, or where pages lie."""

import pytest

from tests.support.schedules.engine_schedules import alone, check_tokens, random_plan, run_on_fake_session

NUM_SCHEDULES = 240


@pytest.mark.parametrize("block", range(4))
def test_tokens_equal_one_at_a_time(block, one_thread):
    num_preemptions = num_reused = num_aborted = num_skipped_uppers = 0
    for seed in range(block, NUM_SCHEDULES, 4):
        plan = random_plan(seed)
        session, engine, tokens, reasons, aborted = run_on_fake_session(plan)
        assert session.max_tokens_seen <= plan.max_num_tokens
        check_tokens(tokens, reasons, aborted, alone(seed), seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_free_pages"] == plan.num_pages
        assert stats["num_failed_steps"] == 0
        assert not engine.scheduler.running and not engine.scheduler.waiting
        num_preemptions += stats["num_preemptions"]
        num_reused += stats["num_reused_tokens"]
        num_aborted += len(aborted)
        num_skipped_uppers += session.num_lower_calls - session.num_upper_calls
    # The schedules exercise what they claim to.
    assert num_preemptions > 20 and num_reused > 500 and num_aborted > 20 and num_skipped_uppers > 100
