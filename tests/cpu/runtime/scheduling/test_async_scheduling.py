"""Steps planned while a device that works later computes the step before: no token differs, nothing leaks."""

import dataclasses
import functools
import random
from types import SimpleNamespace

import pytest

from kvforge.common.errors import EngineError
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.scoring.score import score
from tests.support.schedules.engine_schedules import random_plan, run_on_fake_session
from tests.support.sessions.fake import FakeSession
from tests.support.sessions.simulated_device import SimulatedDevice

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [5, 6, 7, 8, 30, 31, 32, 33], "c": [40]}


def device(seed, **changes):
    return SimulatedDevice(FakeSession(**changes), random.Random(seed))


def run(plan, seed):
    make = functools.partial(device, seed)
    session, engine, *found = run_on_fake_session(plan, make, async_scheduling=True)
    check_empty(engine)
    return session, engine, *found


def check_empty(engine):
    stats = engine.stats()
    assert stats["num_used_pages"] == 0 and stats["num_free_pages"] == engine.config.num_pages
    assert len(engine.scheduler.slots.free_slots) == engine.config.max_num_seqs
    assert not engine.scheduler.running and not engine.scheduler.waiting and not engine.scheduler.awaited


ON_DEVICE = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": None}
ON_DEVICE |= {"bad_words_ids": (), "logit_bias": None}


@pytest.mark.parametrize("sampling", ["greedy", "on the device", "any"])
def test_tokens_equal_the_synchronous_engines(sampling, one_thread, seeds):
    """Of any sampling: what the host must choose, it chooses between two steps that are launched ahead."""
    num_ahead = num_preemptions = num_aborted = num_reused = 0
    for seed in seeds(20, 400):
        plan = random_plan(seed, sampled=sampling != "greedy")
        for request in plan.requests if sampling == "on the device" else ():
            request.params = dataclasses.replace(request.params, **ON_DEVICE)
        session, engine, tokens, reasons, aborted = run(plan, seed)
        _, _, wanted, ends, given_up = run_on_fake_session(plan)
        for key in wanted:
            if key[0] in aborted | given_up:
                shorter = min(len(wanted[key]), len(tokens.get(key, [])))
                assert wanted[key][:shorter] == tokens.get(key, [])[:shorter], (seed, key)
            else:
                assert (tokens[key], reasons[key]) == (wanted[key], ends[key]), (seed, key)
        stats = engine.stats()
        assert stats["num_failed_steps"] == 0
        num_ahead += session.num_ahead
        num_preemptions += stats["num_preemptions"]
        num_reused += stats["num_reused_tokens"]
        num_aborted += len(aborted)
    assert num_ahead > 20 and num_preemptions > 2 and num_aborted > 2 and num_reused > 40


def texts(engine, prompts, after_step=lambda clock: None, params=GREEDY):
    """Tokens and finish reasons by request."""
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    tokens, reasons, clock = {name: [] for name in prompts}, {}, 0
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in reasons
            tokens[output.request_id] += output.new_token_ids
            if output.finished:
                reasons[output.request_id] = output.finish_reason
        engine.check_invariants()
        after_step(clock)
        clock += 1
        assert clock < 1000
    return tokens, reasons


def small(session, **options):
    return LLMEngine(session=session, num_pages=12, max_num_seqs=2, max_num_tokens=6, **options)


@functools.cache
def expected():
    return texts(small(FakeSession()), PROMPTS)[0]


@pytest.mark.parametrize("given_up", [{"a"}, {"b"}, {"c"}, set(PROMPTS)])
def test_requests_are_given_up_at_every_point(given_up):
    """Before their first step, behind each launched one, and while their last one computes."""
    for moment in range(16):
        for seed in range(2):
            session = device(seed)
            engine = small(session, async_scheduling=True)

            def after_step(clock, engine=engine, session=session, moment=moment):
                for name in given_up if clock == moment else ():
                    engine.abort(name)
                    engine.check_invariants()
                session.poison_pages(engine.scheduler.pool.free_pages)

            tokens, reasons = texts(engine, PROMPTS, after_step)
            for other in PROMPTS:
                wanted = expected()[other]
                assert tokens[other] == (wanted if other in reasons else wanted[: len(tokens[other])])
            assert reasons.keys() >= PROMPTS.keys() - given_up
            check_empty(engine)
            assert texts(engine, PROMPTS)[0] == expected()


@pytest.mark.parametrize("when", ["on the device", "as it is launched"])
def test_what_fails_ends_what_is_in_flight_alone(when):
    """Nothing that a failed step computed is offered to others."""
    for fails in range(1, 14):
        for seed in range(2):
            session = device(seed)
            if when == "on the device":
                session.session.fail_on = lambda one, fails=fails: one.num_lower_calls == fails
            else:
                session.fails_at = fails
            engine = small(session, async_scheduling=True)
            poison = lambda clock, e=engine, s=session: s.poison_pages(e.scheduler.pool.free_pages)  # noqa: E731
            tokens, reasons = texts(engine, PROMPTS, poison)
            assert set(reasons.values()) <= {"length", "error"}
            for name, reason in reasons.items():
                assert tokens[name] == expected()[name][: len(tokens[name])]
                assert (len(tokens[name]) == 9) == (reason == "length")
            failed = engine.stats()["num_failed_steps"]
            assert failed == ("error" in reasons.values()) or failed == 1
            check_empty(engine)
            assert texts(engine, PROMPTS, poison)[0] == expected()


def test_engines_that_can_not_run_ahead_say_so(tmp_path):
    with pytest.raises(EngineError, match="async_scheduling does not go with target cpu, which computes a step while"):
        small(FakeSession(), async_scheduling=True)
    with pytest.raises(EngineError, match="async_scheduling does not go with prefix_dir"):
        small(device(0), async_scheduling=True, prefix_dir=tmp_path)


def test_scores_do_not_mind_a_step_in_flight():
    found = []
    for session, options in ((FakeSession(), {}), (device(2), {"async_scheduling": True})):
        engine = small(session, **options)
        engine.add_request("a", PROMPTS["a"], GREEDY)
        engine.step()
        scored = score(SimpleNamespace(engine=engine), [(PROMPTS["b"], [9, 9, 9])])
        engine.abort("a")
        found.append(([one.logprobs.tolist() for one in scored], texts(engine, {"c": PROMPTS["c"]})))
        check_empty(engine)
    assert found[0] == found[1]


def test_sequences_of_one_request_and_one_slot():
    params = dataclasses.replace(GREEDY, n=3)
    engine = LLMEngine(session=device(1), num_pages=12, max_num_seqs=1, async_scheduling=True)
    engine.add_request("three", PROMPTS["a"], params)
    found = {}
    while engine.has_unfinished():
        for output in engine.step():
            found.setdefault(output.index, []).extend(output.new_token_ids)
        engine.check_invariants()
    assert found == dict.fromkeys(range(3), expected()["a"])
    check_empty(engine)
