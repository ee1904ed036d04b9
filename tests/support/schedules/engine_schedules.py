"""Random schedules: requests, arrivals, aborts and limits drawn from one seed, and how to run them."""

import dataclasses
import functools
import random
from dataclasses import dataclass, field

from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.sessions.fake import FakeSession


@dataclass
class PlannedRequest:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int
    abort_at: int | None


@dataclass
class Plan:
    seed: int
    page_size: int
    num_pages: int
    max_num_tokens: int
    max_num_seqs: int
    enable_prefix_cache: bool
    requests: list[PlannedRequest] = field(default_factory=list)

    @property
    def limits(self) -> dict[str, int]:
        """Those of an engine, as its arguments."""
        return {name: getattr(self, name) for name in ("num_pages", "max_num_tokens", "max_num_seqs")}

    def prefixes(self, **snapshots: int) -> dict[str, int]:
        """What an engine is told of prefixes: of ``snapshots`` where it keeps any."""
        return {"enable_prefix_cache": self.enable_prefix_cache} | (snapshots if self.enable_prefix_cache else {})


def random_plan(
    seed,
    *,
    page_sizes=(1, 2, 3, 4, 8),
    vocab_size=64,
    max_prompt=40,
    max_new=24,
    max_seqs=8,
    max_requests=10,
    sampled=True,
):
    """Draw a schedule; most have pools so small that sequences are preempted."""
    rng = random.Random(seed)
    page_size = rng.choice(page_sizes)
    longest = -(-(max_prompt + max_new) // page_size)
    num_pages = longest + (rng.randint(0, 2) if rng.random() < 0.6 else rng.randint(0, 6 * longest))
    plan = Plan(
        seed,
        page_size,
        num_pages,
        rng.choice([1, 2, 3, 5, 7, 8, 16, 33, 64]),
        rng.randint(1, max_seqs),
        rng.random() < 0.75,
    )
    shared = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, max_prompt))] for _ in range(2)]
    clock = 0
    for i in range(rng.randint(2, max_requests)):
        clock += rng.choice([0, 0, 1, 2, rng.randint(0, 20)])
        own = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 12))]
        base = rng.choice([*shared, []])[: rng.randint(0, max_prompt)]
        size = rng.choice([3, rng.randint(1, max_prompt)])
        prompt = (base + own)[:size] if rng.random() < 0.9 else rng.choice(shared)
        params = (
            _random_params(rng, max_new)
            if sampled
            else SamplingParams(
                temperature=0.0,
                max_tokens=rng.randint(1, max_new),
                ignore_eos=rng.random() < 0.7,
                n=rng.choice([1, 1, 1, 2]),
                priority=rng.choice([0, 0, 0, 1]),
            )
        )
        abort_at = clock + rng.randint(0, 25) if rng.random() < 0.2 else None
        plan.requests.append(PlannedRequest(f"r{i}", prompt, params, clock, abort_at))
    return plan


def _random_params(rng, max_new):
    greedy = rng.random() < 0.5
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=0.0 if greedy else rng.choice([0.5, 1.0, 1.7]),
        top_p=rng.choice([1.0, 1.0, 0.8, 0.3]),
        top_k=rng.choice([0, -1, 1, 3, 20]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(1, max_new),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, 3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        stop_token_ids=rng.choice([(), (), (7,)]),
        stop_words_ids=rng.choice([(), ((5,), (9, 11))]),
        bad_words_ids=rng.choice([(), ((4,), (8, 10))]),
        logit_bias=rng.choice([None, None, {20: 2.0, 21: -5.0}]),
        top_p_decay=rng.choice([1.0, 1.0, 0.8]),
        top_p_min=0.2,
        top_p_reset_id=rng.choice([-1, 20]),
    )


@functools.cache
def alone(seed, memory=0):
    """(tokens, reason) by (request_id, index) of ``random_plan(seed)`` on the fake model, each sequence alone: its
    seed, one request, one sequence, roomy pool."""
    results = {}
    for request in random_plan(seed).requests:
        for index in range(request.params.n):
            params = dataclasses.replace(request.params, n=1, seed=request.params.seed + index)
            engine = LLMEngine(
                session=FakeSession(memory=memory, page_size=16), num_pages=64, enable_prefix_cache=False
            )
            engine.add_request("alone", request.prompt, params)
            tokens, reason = [], None
            while engine.has_unfinished():
                for output in engine.step():
                    tokens += output.new_token_ids
                    reason = output.finish_reason
            results[request.request_id, index] = tokens, reason
    return results


def run_plan(engine, plan, after_step=lambda: None, rng_pages=True):
    """Run a schedule; returns tokens and finish reason by (request_id, index), and what was aborted."""
    if rng_pages:
        random.Random(plan.seed).shuffle(engine.scheduler.pool.free_pages)
    tokens, reasons, aborted = {}, {}, set()
    pending, clock = sorted(plan.requests, key=lambda r: r.arrival), 0
    while pending or engine.has_unfinished():
        while pending and pending[0].arrival <= clock:
            request = pending.pop(0)
            engine.add_request(request.request_id, request.prompt, request.params)
        for request in plan.requests:
            if request.abort_at == clock and engine.abort(request.request_id):
                aborted.add(request.request_id)
                assert not engine.abort(request.request_id)
                engine.check_invariants()
        for output in engine.step():
            key = (output.request_id, output.index)
            assert key not in reasons, "output of a finished sequence"
            assert output.request_id not in aborted, "output of an aborted request"
            tokens.setdefault(key, []).extend(output.new_token_ids)
            if output.finished:
                reasons[key] = output.finish_reason
        engine.check_invariants()
        after_step()
        clock += 1
        assert clock < 20000, "no progress"
    return tokens, reasons, aborted


def run_on_fake_session(plan, session_type=FakeSession, **options):
    """Run a schedule on a new engine whose free pages are poisoned after each step; returns the session, the engine and
    what ``run_plan`` does."""
    session = session_type(page_size=plan.page_size)
    engine = LLMEngine(
        session=session,
        num_pages=plan.num_pages,
        max_num_tokens=plan.max_num_tokens,
        max_num_seqs=plan.max_num_seqs,
        enable_prefix_cache=plan.enable_prefix_cache,
        **options,
    )
    pool = engine.scheduler.pool
    return session, engine, *run_plan(engine, plan, after_step=lambda: session.poison_pages(pool.free_pages))


def check_tokens(tokens, reasons, aborted, expected, seed):
    """What ``run_plan`` returned is ``expected``, {key: (tokens, reason)}; of an aborted request, its beginning."""
    for key, (wanted, reason) in expected.items():
        got = tokens.get(key, [])
        if key[0] in aborted and key not in reasons:
            assert got == wanted[: len(got)], (seed, key)
        else:
            assert (got, reasons[key]) == (wanted, reason), (seed, key)
