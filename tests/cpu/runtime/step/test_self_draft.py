"""Drafts by the engine's own early exit, within the step: the tokens of plain decoding, whatever the exit says."""

import dataclasses
import random
from collections import Counter

import pytest

from kvforge.common.errors import EngineError
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from kvforge.runtime.step.self_draft import MIN_CONFIDENCE
from tests.support.schedules.engine_schedules import alone, check_tokens, random_plan, run_plan
from tests.support.sessions.exit import ExitSession
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def as_long_as_possible(monkeypatch):
    """Draft lengths that do not depend on times."""
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: True)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences, available: dict(available))


def self_drafting(count):
    return SpeculativeConfig("early_exit", num_speculative_tokens=count)


def make_engine(session, plan, **options):
    return LLMEngine(
        session=session,
        num_pages=plan.num_pages,
        max_num_tokens=plan.max_num_tokens,
        max_num_seqs=plan.max_num_seqs,
        enable_prefix_cache=plan.enable_prefix_cache,
        **options,
    )


def test_tokens_equal_plain_decoding(seeds, full):
    """Greedy and sampled, with penalties, bad words, stop words, seeds, preemption, chunks, prefix hits, aborts."""
    counts = Counter()
    for seed in seeds(20, 200):
        rng, plan, expected = random.Random(seed), random_plan(seed), alone(seed)
        if rng.random() < 0.3:  # some requests bring drafts of their own
            for request in plan.requests:
                guess = tuple(expected[request.request_id, 0][0][: rng.randint(0, 3)])[: plan.max_num_tokens - 1]
                request.params = dataclasses.replace(request.params, draft_token_ids=guess)
        session = ExitSession(page_size=plan.page_size, agreement=rng.choice([0.0, 0.5, 0.9, 1.0]))
        engine = make_engine(session, plan, speculative=self_drafting(rng.choice([1, 2, 4, 7])))
        engine.runner.self_draft.min_confidence = rng.choice([0.0, 0.4, MIN_CONFIDENCE])
        pool = engine.scheduler.pool
        after_step = lambda session=session, pool=pool: session.poison_pages(pool.free_pages)  # noqa: E731
        tokens, reasons, aborted = run_plan(engine, plan, after_step)
        assert session.max_tokens_seen <= plan.max_num_tokens
        check_tokens(tokens, reasons, aborted, expected, seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_free_pages"] == plan.num_pages
        assert stats["num_failed_steps"] == 0
        counts.update(
            preempted=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            accepted=stats["num_accepted_draft_tokens"],
            rejected=stats["num_draft_tokens"] - stats["num_accepted_draft_tokens"],
            aborted=len(aborted),
        )
    # The schedules exercise what they claim to.
    assert min(counts[name] for name in ("preempted", "aborted")) > (2 if full else 0), counts
    assert min(counts[name] for name in ("reused", "accepted", "rejected")) > (80 if full else 25), counts


def serve(session, prompts, params, min_confidence=MIN_CONFIDENCE, **options):
    """(tokens, tokens of each step) of each prompt, and the engine; the invariants hold after every step."""
    engine = LLMEngine(session=session, num_pages=100, **options)
    engine.runner.self_draft.min_confidence = min_confidence
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    steps = {}
    while engine.has_unfinished():
        for output in engine.step():
            steps.setdefault((int(output.request_id), output.index), []).append(output)
        engine.check_invariants()
    texts = {key: [t for output in outputs for t in output.new_token_ids] for key, outputs in steps.items()}
    return texts, {key: [len(o.new_token_ids) for o in outputs] for key, outputs in steps.items()}, engine


PROMPTS = [[5, 6, 7], [9] * 11, [5, 6, 7, 8]]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_an_exit_that_is_always_right_gives_a_token_more_than_drafts_in_each_step(count):
    plain, _, _ = serve(FakeSession(), PROMPTS, GREEDY)
    session = ExitSession(agreement=1.0, scales=(1000.0,))
    texts, steps, engine = serve(session, PROMPTS, GREEDY, speculative=self_drafting(count))
    assert texts == plain
    for sizes in steps.values():
        assert sizes[0] == 1 and set(sizes[1:-1]) == {count + 1}, "the first token comes with the prompt"
    stats = engine.stats()
    assert stats["num_accepted_draft_tokens"] == stats["num_draft_tokens"] > 0
    assert stats["num_upper_calls"] == stats["num_iterations"] <= 1 + -(-23 // (count + 1))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.7, seed=3, n=2, max_tokens=24, top_p=0.9)])
def test_drafting_stops_where_the_exit_is_not_sure(params):
    """Logits a tenth as large: no token of 64 is likely."""
    session = ExitSession(agreement=1.0, scales=(0.1,))
    texts, _, engine = serve(session, PROMPTS, params, speculative=self_drafting(4))
    assert texts == serve(FakeSession(), PROMPTS, params)[0]
    assert engine.stats()["num_draft_tokens"] == 0 and session.num_lower_calls == engine.stats()["num_iterations"]


def test_sampled_drafts_take_the_random_numbers_of_their_tokens():
    """With the model's own distribution every draft is right, though each token is one of many."""
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=33, ignore_eos=True, top_p=0.95)
    session = ExitSession(agreement=1.0, scales=(1.0,))
    texts, _, engine = serve(session, PROMPTS, params, 0.0, speculative=self_drafting(4))
    assert texts == serve(FakeSession(), PROMPTS, params)[0]
    assert len({tuple(text) for text in texts.values()}) == 9
    assert engine.stats()["num_accepted_draft_tokens"] == engine.stats()["num_draft_tokens"] > 20


def test_a_token_that_ends_the_sequence_is_not_drafted():
    plain, _, _ = serve(FakeSession(), [PROMPTS[0]], GREEDY)
    stop = plain[0, 0][6]
    assert stop not in plain[0, 0][:6]
    params = dataclasses.replace(GREEDY, stop_token_ids=[stop])
    session = ExitSession(agreement=1.0, scales=(1000.0,))
    texts, steps, engine = serve(session, [PROMPTS[0]], params, speculative=self_drafting(7))
    assert texts[0, 0] == plain[0, 0][:7] and steps[0, 0] == [1, 6]
    assert engine.stats()["num_draft_tokens"] == engine.stats()["num_accepted_draft_tokens"] == 5


def test_an_error_while_drafting_ends_the_sequences_of_the_step(caplog):
    session = ExitSession(agreement=1.0, scales=(1000.0,))
    session.fail_on = lambda session: session.num_lower_calls == 4  # the third draft of the second step
    texts, _, engine = serve(session, PROMPTS[:1], GREEDY, speculative=self_drafting(4))
    assert len(texts[0, 0]) == 1 and engine.stats()["num_failed_steps"] == 1
    assert engine.stats()["num_used_pages"] == 0
    engine.add_request("next", PROMPTS[0], GREEDY)
    tokens = [token for _ in range(6) for output in engine.step() for token in output.new_token_ids]
    assert tokens == serve(FakeSession(), PROMPTS[:1], GREEDY)[0][0, 0]


def test_engines_that_cannot_are_refused():
    with pytest.raises(EngineError, match=r"this engine has no early exit; build it from a checkpoint with that head"):
        LLMEngine(session=FakeSession(max_draft_len=4), num_pages=20, speculative=self_drafting(4))
    with pytest.raises(EngineError, match=r"rebuild with kvforge build --max-draft-len 5"):
        LLMEngine(session=ExitSession(max_draft_len=4), num_pages=20, speculative=self_drafting(5))
    with pytest.raises(EngineError, match=r"does not go with speculative decoding"):
        options = {"speculative": self_drafting(2), "early_exit_threshold": 0.5}
        LLMEngine(session=ExitSession(), num_pages=20, **options)
