"""Prompts that begin alike and are in flight together: the beginning is computed once, and nothing else changes."""

import dataclasses
import random

import pytest

from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.sessions.session import load_session
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.schedules.engine_schedules import PlannedRequest, check_tokens, random_plan, run_on_fake_session
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PREFIX = [5 + i % 50 for i in range(24)]


class CountingSession(FakeSession):
    num_tokens = 0

    def lower(self, step, pools):
        self.num_tokens += len(step.input_ids)
        return super().lower(step, pools)


def make_engine(session=None, **options):
    return LLMEngine(session=session or CountingSession(max_num_tokens=256), **{"num_pages": 100, **options})


def run(engine):
    tokens, reasons = {}, {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                reasons[output.request_id] = output.finish_reason
        engine.check_invariants()
    return tokens, reasons


def alone(prompt, params=GREEDY):
    engine = make_engine(enable_prefix_cache=False)
    engine.add_request("alone", prompt, params)
    return run(engine)[0]["alone"]


def prompts(count, prefix=PREFIX, suffix=3):
    return {f"r{i}": prefix + [30 + i] * suffix for i in range(count)}


def add(engine, requests, params=GREEDY):
    for name, prompt in requests.items():
        engine.add_request(name, prompt, params)


@pytest.mark.parametrize("budget", [256, 40, 7])
def test_a_common_beginning_is_computed_once(budget) -> None:
    """The first prompt in one step, the other suffixes in the next."""
    session, requests = CountingSession(max_num_tokens=256), prompts(6)
    engine = make_engine(session, max_num_tokens=budget)
    add(engine, requests)
    tokens, _ = run(engine)
    assert session.num_tokens == len(PREFIX) + 6 * (3 + GREEDY.max_tokens - 1)
    assert tokens == {name: alone(prompt) for name, prompt in requests.items()}
    if budget == 256:
        assert engine.num_iterations == 1 + GREEDY.max_tokens and engine.scheduler.admissions.num_waits == 5


def test_a_prompt_of_which_little_is_in_flight_does_not_wait() -> None:
    """Of 27 tokens one page would come: they are computed in the same step, as there is room for them."""
    engine = make_engine()
    add(engine, {"a": PREFIX[:4] + [7] * 20, "b": PREFIX[:4] + [8] * 23})
    engine.step()
    assert len(engine.scheduler.running) == 2 and engine.scheduler.admissions.num_waits == 0


def test_without_the_prefix_cache_nobody_waits() -> None:
    engine = make_engine(enable_prefix_cache=False)
    add(engine, prompts(4))
    assert len(engine.step()) == 4


def test_a_prompt_that_arrives_meanwhile_joins_at_the_pages_that_are_there() -> None:
    session = CountingSession(max_num_tokens=256)
    engine = make_engine(session, max_num_tokens=10)
    first, second = PREFIX * 2 + [40], PREFIX * 2 + [41]
    add(engine, {"first": first})
    engine.step()
    engine.step()
    add(engine, {"second": second})
    tokens, _ = run(engine)
    assert session.num_tokens == len(first) + 1 + 2 * (GREEDY.max_tokens - 1)
    assert tokens == {"first": alone(first), "second": alone(second)}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_who_is_waited_for_is_given_up(steps) -> None:
    requests = prompts(4)
    engine = make_engine(max_num_tokens=16)
    add(engine, requests)
    for _ in range(steps):
        engine.step()
    assert engine.abort("r0")
    engine.check_invariants()
    tokens, reasons = run(engine)
    assert {name: tokens[name] for name in list(requests)[1:]} == {
        n: alone(p) for n, p in requests.items() if n != "r0"
    }
    assert set(reasons) == set(requests) - {"r0"} and engine.stats()["num_used_pages"] == 0


def test_the_step_that_is_waited_for_fails(caplog) -> None:
    """Its pages never come; who waited computes them."""
    session, requests = CountingSession(max_num_tokens=256), prompts(4)
    session.fail_on = lambda s: s.num_lower_calls == 1
    engine = make_engine(session)
    add(engine, requests)
    tokens, reasons = run(engine)
    assert reasons == {"r0": "error", "r1": "length", "r2": "length", "r3": "length"}
    assert {name: tokens[name] for name in ("r1", "r2", "r3")} == {n: alone(requests[n]) for n in ("r1", "r2", "r3")}


def test_another_prompt_passes_but_leaves_slots_and_pages() -> None:
    """ "small" runs beside the prompt that "waiting" waits for; "large" would take pages that "waiting" needs."""
    for other, size, passes in (("small", 4, True), ("large", 48, False)):
        engine = make_engine(num_pages=22)
        add(engine, {"first": PREFIX, "waiting": [*PREFIX, 60], other: [50] * size})
        engine.step()
        running = {sequence.request_id for sequence in engine.scheduler.running}
        assert running == ({"first", other} if passes else {"first"})
        engine.step()
        assert "waiting" in {sequence.request_id for sequence in engine.scheduler.running}
        run(engine)
    engine = make_engine(max_num_seqs=2)
    add(engine, {"first": PREFIX, "waiting": [*PREFIX, 60], "other": [50] * 4})
    assert [output.request_id for output in engine.step()] == ["first"]
    assert [output.request_id for output in engine.step()] == ["first", "waiting"]


def test_a_better_priority_waits_for_no_more_than_the_step() -> None:
    engine = make_engine(max_num_tokens=16)
    add(engine, {"late": PREFIX})
    engine.step()
    add(engine, {"urgent": [*PREFIX, 60]}, dataclasses.replace(GREEDY, priority=-1))
    assert [output.request_id for output in engine.step()] == ["late"] and engine.scheduler.admissions.num_waits == 1
    assert {output.request_id for output in engine.step()} == {"urgent", "late"}


def test_nobody_waits_for_a_prompt_that_has_just_made_room() -> None:
    """ "low" is planned to its end, then gives its pages to "urgent"; "joins" would have waited for them."""
    engine, prompt = make_engine(num_pages=29, max_num_tokens=64), PREFIX * 4
    add(engine, {"low": prompt}, dataclasses.replace(GREEDY, priority=1, max_tokens=2))
    engine.step()
    add(engine, {"urgent": [40] * 20, "joins": [*prompt[:80], 41]})
    assert [output.request_id for output in engine.step()] == ["urgent", "joins"]
    assert engine.scheduler.num_preemptions == 1
    assert run(engine)[1] == dict.fromkeys(("urgent", "joins", "low"), "length")


def test_admitting_many_looks_at_each_once(monkeypatch) -> None:
    """48 requests of 3 sequences: neither running nor waiting ones are gone through again for every admission."""
    looks, of_sequence = [], Sequence.waits_for_leader.fget
    monkeypatch.setattr(Sequence, "waits_for_leader", property(lambda self: looks.append(self) or of_sequence(self)))
    missing = Scheduler.missing_pages
    monkeypatch.setattr(Scheduler, "missing_pages", lambda self, s: looks.append(s) or missing(self, s))
    engine = make_engine(CountingSession(max_num_tokens=256, max_num_seqs=144), num_pages=1000)
    add(engine, {f"r{i}": [5 + i] * 4 for i in range(48)}, dataclasses.replace(GREEDY, n=3))
    engine.step()
    assert len(engine.scheduler.running) == 48 and len(looks) <= 4 * 48


@pytest.mark.parametrize("chunk", [24, 256])
def test_a_compiled_engine_gives_the_same_tokens_with_the_cache_and_without(engines: EngineShelf, chunk: int) -> None:
    """8 prompts of 60 tokens, of which 56, seven pages, are the same."""
    directory, requests = engines.engine(SWIFTKV), prompts(8, [10 + i for i in range(56)], 4)
    manifest = load_manifest(directory)
    session, results = load_session(directory, manifest), {}
    for use_cache in (True, False):
        engine = LLMEngine(session=session, num_pages=100, enable_prefix_cache=use_cache, max_num_tokens=chunk)
        add(engine, requests)
        results[use_cache] = run(engine)
        assert engine.stats()["num_reused_tokens"] == (7 * 56 if use_cache else 0)
    assert results[True] == results[False] and len(results[True][0]) == 8


def shared_plan(seed):
    """A random schedule whose prompts are mostly a common beginning, at most a few steps apart."""
    plan, rng = random_plan(seed), random.Random(seed)
    base = [rng.randrange(3, 64) for _ in range(36)]
    for request in plan.requests:
        own = [rng.randrange(3, 64) for _ in range(rng.randint(1, 4))]
        request.prompt = (base[: rng.choice([36, 36, 20, 36, rng.randint(0, 36)])] + own)[:40]
        request.arrival = rng.choice([0, 0, 0, 1, 3])
        request.abort_at = request.arrival + rng.randint(0, 8) if rng.random() < 0.2 else None
    plan.max_num_tokens = rng.choice([3, 8, 33, 64, 64])
    plan.enable_prefix_cache = True
    return plan


def expected_of(request: PlannedRequest):
    results = {}
    for index in range(request.params.n):
        params = dataclasses.replace(request.params, n=1, seed=request.params.seed + index)
        engine = make_engine(FakeSession(page_size=16), enable_prefix_cache=False)
        engine.add_request("alone", request.prompt, params)
        tokens, reasons = run(engine)
        results[request.request_id, index] = tokens["alone"], reasons["alone"]
    return results


def test_tokens_equal_one_at_a_time_whoever_shares() -> None:
    num_waits = num_preemptions = num_aborted = 0
    for seed in range(40):
        plan = shared_plan(seed)
        _, engine, tokens, reasons, aborted = run_on_fake_session(plan)
        expected = {}
        for request in plan.requests:
            expected |= expected_of(request)
        check_tokens(tokens, reasons, aborted, expected, seed)
        assert engine.stats()["num_used_pages"] == 0 and engine.stats()["num_failed_steps"] == 0
        num_waits += engine.scheduler.admissions.num_waits
        num_preemptions += engine.stats()["num_preemptions"]
        num_aborted += len(aborted)
    assert num_waits > 30 and num_preemptions > 15 and num_aborted > 15, (num_waits, num_preemptions, num_aborted)
