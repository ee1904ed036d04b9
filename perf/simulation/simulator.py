"""The engine's scheduler under simulated traffic: real plans and pages, a cost model in place of the graphs."""

import time
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from kvforge.runtime.config import MAX_CACHE_TOKENS, RuntimeConfig
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.scheduling.invariants import check_invariants
from kvforge.runtime.scheduling.scheduler import Scheduler
from perf.simulation.arrivals import Traffic, arrival_times
from perf.simulation.cost_model import CostModel
from perf.simulation.work import step_work


@dataclass(frozen=True)
class Limits:
    """The scheduler's limits: tokens and sequences of a step, and bytes of cache."""

    max_num_tokens: int = 2048
    max_num_seqs: int = 256
    kv_cache_bytes: float = 4 * 2**30

    def __post_init__(self) -> None:
        if min(self.max_num_tokens, self.max_num_seqs) < 1 or not 0 < self.kv_cache_bytes < float("inf"):
            raise KvforgeError("a step has at least 1 token and 1 sequence, and the cache a finite size above 0.")

    def config(self, costs: CostModel, max_seq_len: int) -> RuntimeConfig:
        """Return them for an engine and sequences of up to ``max_seq_len`` tokens; no prefix is looked for.

        Raises:
            KvforgeError: one sequence does not fit the cache.
        """
        num_pages = int(self.kv_cache_bytes // costs.page_bytes)
        if num_pages * costs.page_size < max_seq_len - 1:
            raise KvforgeError(
                f"a cache of {self.kv_cache_bytes / 2**30:.3g} GiB does not hold one sequence of {max_seq_len} tokens; "
                "give more with --kv-cache-gib."
            )
        if num_pages > MAX_CACHE_TOKENS // costs.page_size:
            raise KvforgeError(
                f"a cache of {self.kv_cache_bytes / 2**30:.3g} GiB is more than an engine can use; "
                "give less with --kv-cache-gib."
            )
        return RuntimeConfig(
            num_pages=num_pages, page_size=costs.page_size,
            max_num_seqs=min(self.max_num_seqs, num_pages, self.max_num_tokens), max_num_tokens=self.max_num_tokens,
            max_seq_len=max_seq_len, vocab_size=1, eos_token_ids=(), enable_prefix_cache=False,
            max_num_survivors=self.max_num_seqs,
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What happened, times in virtual seconds; arrays are by request, in order of arrival, or by step."""

    traffic: Traffic
    arrival: np.ndarray
    first_scheduled: np.ndarray
    """[requests] beginning of the first step with tokens of the request"""
    first_token: np.ndarray
    last_token: np.ndarray
    token_gaps: np.ndarray
    """[all output tokens but the first of each request] time since the request's token before"""
    running: np.ndarray
    """[steps] running sequences"""
    scheduler_seconds: np.ndarray
    """[steps] real processor time of planning and committing; the one thing here that a seed does not determine"""
    num_preemptions: int
    peak_pages: float
    """The largest part of the pool that was in use."""

    @property
    def total(self) -> float:
        """Time of the last token."""
        return float(self.last_token.max())


def simulate(
    costs: CostModel, traffic: Traffic, limits: Limits, seed: int = 0, check: bool = False, progress: bool = False
) -> Outcome:
    """Serve ``traffic`` in virtual time, to the last token of every request.

    Args:
        check: test the scheduler's invariants after every step (slow).

    Raises:
        KvforgeError: one sequence does not fit the cache.
    """
    num, length = traffic.num_requests, traffic.input_tokens + traffic.output_tokens
    config = limits.config(costs, length)
    scheduler = Scheduler(config)
    arrival = arrival_times(traffic, seed)
    first_scheduled, first_token, last_token = np.full((3, num), np.nan)
    left = np.full(num, traffic.output_tokens)
    prompt, params = np.zeros(traffic.input_tokens, dtype=np.int32), SamplingParams(max_tokens=traffic.output_tokens)
    gaps: list[np.ndarray] = []
    running: list[int] = []
    processor: list[float] = []
    now, num_arrived, num_finished, min_available = 0.0, 0, 0, config.num_pages
    bar = tqdm(total=num, unit="request", leave=False, disable=None if progress else True)
    while num_finished < num:
        if num_finished == num_arrived:
            now = max(now, float(arrival[num_arrived]))
        while num_arrived < num and arrival[num_arrived] <= now:
            metrics = RequestMetrics(0, 0)
            sequence = Sequence(str(num_arrived), 0, (0, num_arrived, 0), prompt, params, length, metrics)
            scheduler.add(sequence)
            num_arrived += 1

        started = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        begun = [sequence for sequence in plan.decodes if not sequence.prompt_done]  # prompts of one token
        for sequence in (*begun, *(sequence for sequence, _ in plan.prefills)):
            if sequence.num_computed == 0 and not sequence.metrics.num_preemptions:
                first_scheduled[sequence.order[1]] = now
        now += costs.seconds(step_work(plan, costs.num_layers, costs.cut))
        min_available = min(min_available, scheduler.pool.num_available)
        running.append(len(scheduler.running))
        committing = time.perf_counter()
        survivors = plan.survivors
        scheduler.commit(plan)
        scheduler.append(survivors, [0] * len(survivors))
        processor.append(time.perf_counter() - committing + planned - started)

        rows = np.array([sequence.order[1] for sequence in survivors], dtype=np.intp)
        is_first = np.isnan(first_token[rows])
        first_token[rows[is_first]] = now
        gaps.append(now - last_token[rows[~is_first]])
        last_token[rows] = now
        left[rows] -= 1
        done = np.flatnonzero(left[rows] == 0)
        for i in done.tolist():
            scheduler.finish(survivors[i])
        num_finished += len(done)
        bar.update(len(done))
        if check:
            check_invariants(scheduler)
    bar.close()
    if scheduler.pool.num_used or scheduler.running or scheduler.waiting:
        raise AssertionError("pages or sequences are left over")
    return Outcome(
        traffic, arrival, first_scheduled, first_token, last_token, np.concatenate(gaps), np.array(running),
        np.array(processor), scheduler.num_preemptions, 1 - min_available / config.num_pages,
    )  # fmt: skip
