"""Early exit of prompts: a prompt whose exit is sure takes its first token from there, wherever and beside whomever."""

import dataclasses
from collections import Counter

import pytest

from kvforge.common.errors import EngineError
from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.schedules.engine_schedules import check_tokens, random_plan, run_on_fake_session
from tests.support.sessions.exit import ExitSession
from tests.support.sessions.exit_rule import check_any_sampling, expected_text, random_threshold, serve
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 11, [5, 6, 7, 8], [3], [4, 4], [17, 3, 9, 12, 8], [6] * 30]


@pytest.mark.parametrize("threshold", [1e-9, 0.2, 0.5, 0.9, 0.999, 1.0])
def test_tokens_are_those_of_the_rule(threshold):
    session = ExitSession(agreement=0.5)
    texts, engine = serve(session, PROMPTS, GREEDY, early_exit_threshold=threshold, early_exit_prompts=True)
    expected = [expected_text(session, prompt, threshold, prompts=True) for prompt in PROMPTS]
    assert [texts[index, 0] for index in range(len(PROMPTS))] == [text.tokens for text in expected]
    stats, num_exits = engine.stats(), sum(text.num_exits for text in expected)
    num_prompts = sum(text.prompt_exits for text in expected)
    assert (stats["num_early_exits"], stats["num_prompt_early_exits"]) == (num_exits, num_prompts)
    assert session.num_upper_rows == 24 * len(PROMPTS) - num_exits, "no row runs for nothing"
    if threshold < 1 / 64:
        assert num_prompts == len(PROMPTS) and stats["num_upper_calls"] == 0
    elif threshold < 0.95:
        assert 0 < num_prompts < len(PROMPTS)
    if threshold == 1.0:
        assert num_exits == 0 and texts == serve(FakeSession(), PROMPTS, GREEDY)[0]


def test_a_prompt_that_asks_for_logits_does_not_exit():
    plain, _ = serve(FakeSession(), PROMPTS, GREEDY)
    for changes in ({"logprobs": 0}, {"return_logits": True}):
        params = dataclasses.replace(GREEDY, **changes)
        texts, engine = serve(ExitSession(), PROMPTS, params, early_exit_threshold=0.1, early_exit_prompts=True)
        assert texts == plain and engine.stats()["num_early_exits"] == engine.stats()["num_prompt_early_exits"] == 0
    engine = LLMEngine(session=ExitSession(), num_pages=100, early_exit_threshold=1e-9, early_exit_prompts=True)
    engine.add_request("asks", PROMPTS[0], dataclasses.replace(GREEDY, logprobs=2))
    engine.add_request("exits", PROMPTS[1], GREEDY)
    tokens = [t for _ in range(24) for o in engine.step() if o.request_id == "asks" for t in o.new_token_ids]
    stats = engine.stats()
    assert tokens == plain[0, 0] and (stats["num_prompt_early_exits"], stats["num_early_exits"]) == (1, 24)


def test_greedy_schedules_give_the_texts_and_exits_of_the_rule(seeds, full):
    """Chunks, preemption, prefix hits, shuffled pages, neighbours and aborts against the rule, which has none."""
    counts = Counter()
    for seed in seeds(12, 200):
        plan, threshold = random_plan(seed, sampled=False), random_threshold(seed)
        session = ExitSession(page_size=plan.page_size)
        rule, expected = {}, {}
        for request in plan.requests:
            eos = None if request.params.ignore_eos else session.manifest.eos_token_ids[0]
            text = expected_text(session, request.prompt, threshold, request.params.max_tokens, True, eos)
            reason = "stop" if text.tokens[-1] == eos else "length"
            for index in range(request.params.n):
                rule[request.request_id, index], expected[request.request_id, index] = text, (text.tokens, reason)
        exits = {"early_exit_threshold": threshold, "early_exit_prompts": True}
        _, engine, tokens, reasons, aborted = run_on_fake_session(plan, ExitSession, **exits)
        check_tokens(tokens, reasons, aborted, expected, seed)
        stats = engine.stats()
        assert stats["num_failed_steps"] == 0
        if not aborted:
            # Every row decides once: what a preempted sequence computes again has its next token already.
            assert stats["num_early_exits"] == sum(text.num_exits for text in rule.values()), seed
            assert stats["num_prompt_early_exits"] == sum(text.prompt_exits for text in rule.values()), seed
        counts.update(
            prompts=stats["num_prompt_early_exits"],
            others=len(rule) - sum(text.prompt_exits for text in rule.values()),
            preempted=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            aborted=len(aborted),
            counted=not aborted,
        )
    assert min(counts["prompts"], counts["others"]) > (20 if full else 6), counts
    assert min(counts.values()) > (1 if full else 0), counts


def test_texts_of_any_sampling_do_not_depend_on_the_schedule(seeds, full):
    """Sampled, with log-probabilities, penalties, stop words and drafts of the request's own, against each alone."""
    counts = Counter()
    for seed in seeds(12, 200):
        stats = check_any_sampling(seed, early_exit_prompts=True)
        counts.update(
            prompts=stats["num_prompt_early_exits"],
            preempted=stats["num_preemptions"],
            accepted=stats["num_accepted_draft_tokens"],
        )
    assert counts["prompts"] > (20 if full else 6) and min(counts.values()) > (2 if full else 0), counts


def test_an_exit_without_finite_logits_is_no_exit():
    class Broken(ExitSession):
        def exit_logits(self, tokens):
            return super().exit_logits(tokens) * float("nan")

    texts, engine = serve(Broken(), PROMPTS, GREEDY, early_exit_threshold=1e-6, early_exit_prompts=True)
    assert texts == serve(FakeSession(), PROMPTS, GREEDY)[0] and engine.stats()["num_prompt_early_exits"] == 0


def test_prompts_do_not_exit_without_a_threshold():
    with pytest.raises(EngineError, match=r"early_exit_prompts goes with early_exit_threshold; give a threshold"):
        LLMEngine(session=ExitSession(), num_pages=20, early_exit_prompts=True)
    with pytest.raises(EngineError, match=r"this engine has no early exit"):
        LLMEngine(session=FakeSession(), num_pages=20, early_exit_threshold=0.5, early_exit_prompts=True)
