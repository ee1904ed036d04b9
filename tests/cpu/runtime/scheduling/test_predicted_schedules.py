"""Prompts that are predicted, by their plans alone: whoever is given up, and when, leaves nothing behind."""

import dataclasses
import random
from collections import Counter

import pytest

from kvforge.common.exact_intervals import ExactTokens
from kvforge.runtime.admission import check_request, new_request
from kvforge.runtime.config import RuntimeConfig, resolve_config
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.scheduling.invariants import check_invariants
from kvforge.runtime.scheduling.scheduler import Scheduler
from tests.support.sessions.fake import fake_manifest

LENGTHS, NUM_TOKENS = (40, 3, 29, 17, 40, 8), 6
EXACT = (ExactTokens(), ExactTokens(4, 5, 0.3, 4), ExactTokens(3, 2), ExactTokens(100))
NUM_PAGES, PAGE_SIZE = 13, 4
"""One long request and its answer have no page to spare, so that others are preempted."""


def config(exact: ExactTokens) -> RuntimeConfig:
    manifest = fake_manifest(page_size=PAGE_SIZE)
    made = resolve_config(manifest, 1 << 30, num_pages=NUM_PAGES, max_num_tokens=9, max_num_seqs=4)
    return dataclasses.replace(made, exact_tokens=exact, enable_prefix_cache=False)  # as of an engine with a predictor


def kind(sequence: Sequence) -> str:
    """Where a request is when it is given up."""
    if sequence.status is Status.WAITING:
        return "preempted" if sequence.metrics.num_preemptions else "waiting"
    if sequence.is_predicting:
        return "predicting"
    return "decoding" if sequence.num_generated else "computing"


def run(exact: ExactTokens, give_up: dict[int, list[int]], kinds: Counter[str]) -> int:
    """Serve all requests but those given up, by number, before the steps named; return the number of steps."""
    rng = random.Random(0)
    scheduler = Scheduler(config(exact))
    sequences = []
    for number, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        checked = check_request([3 + number % 2] * length, params, scheduler.config, None)
        sequences += new_request(f"r{number}", params, checked, number, None).sequences
        scheduler.add(sequences[-1])
    step = 0
    while True:
        for number in give_up.get(step, ()):
            if sequences[number].status is not Status.FINISHED:
                kinds[kind(sequences[number])] += 1
                scheduler.finish(sequences[number])
        plan = scheduler.schedule()
        if not plan:
            break
        for sequence, count in plan.predictions:
            if sequence.num_predicted + count == sequence.num_to_predict:
                plan.importance[sequence] = [rng.random() for _ in range(sequence.num_prompt_tokens)]
        survivors = plan.survivors
        scheduler.commit(plan)
        scheduler.append(survivors, [5] * len(survivors))
        for sequence in survivors:
            if sequence.length == sequence.max_length:
                scheduler.finish(sequence)
        check_invariants(scheduler)
        step += 1
    assert all(sequence.status is Status.FINISHED for sequence in sequences)
    assert scheduler.pool.num_used == 0 and sorted(scheduler.slots.free_slots) == list(range(4))
    assert len(scheduler.pool.free_pages) + len(scheduler.pool.cached_pages) == NUM_PAGES
    return step


@pytest.mark.parametrize("exact", EXACT, ids=str)
def test_who_is_given_up_at_any_step_leaves_no_page(exact: ExactTokens) -> None:
    """Each request before each step, and another one with it or up to two steps later."""
    kinds: Counter[str] = Counter()
    num_steps = run(exact, {}, kinds)
    for step in range(num_steps + 1):
        for number in range(len(LENGTHS)):
            other, later = (number + step) % len(LENGTHS), step + number % 3
            run(exact, {step: [number]} | {later: [number, other]}, kinds)
    wanted = {"waiting", "preempted", "computing", "decoding"}
    assert kinds.keys() >= (wanted if exact.first == 100 else wanted | {"predicting"}), kinds
