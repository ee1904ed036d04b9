"""The questions put to the simulator: throughput by input length, latency by arrival rate, chunk budgets, small pools.

Each experiment is a list of points, which are simulated side by side on the machine's cores; every row has the numbers
of ``summary.summarise`` and what distinguishes its point.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from perf.simulation.arrivals import Traffic
from perf.simulation.cost_model import CostModel
from perf.simulation.simulator import Limits, simulate
from perf.simulation.summary import scheduler_cost, summarise

INPUT_LENGTHS = (500, 1000, 2000, 4000, 8000)
CHUNK_BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
LOADS = (0.3, 0.6, 0.8, 0.95, 1.1, 1.3, 1.6)
"""Arrival rates as parts of what the engine without a cut can serve; above 1 only others keep up."""
POOL_GIB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Point:
    """One simulation: a variant's costs, traffic and limits."""

    variant: str
    costs: CostModel
    traffic: Traffic
    limits: Limits
    seed: int = 0


@dataclass(frozen=True)
class Setting:
    """What the points of an experiment have in common."""

    costs: dict[str, CostModel]
    num_requests: int = 10_000
    input_tokens: int = 2000
    output_tokens: int = 256
    limits: Limits = field(default_factory=Limits)
    seed: int = 0

    def point(self, variant: str, limits: Limits | None = None, **traffic: Any) -> Point:
        """Return a point of the setting, but for ``limits`` and parts of ``traffic``."""
        usual = {
            "num_requests": self.num_requests,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
        }
        return Point(variant, self.costs[variant], Traffic(**{**usual, **traffic}), limits or self.limits, self.seed)


def run_point(point: Point) -> dict[str, Any]:
    """Simulate a point; returns its row."""
    outcome = simulate(point.costs, point.traffic, point.limits, point.seed)
    return {
        "variant": point.variant, "max_num_tokens": point.limits.max_num_tokens,
        "max_num_seqs": point.limits.max_num_seqs, "kv_cache_gib": point.limits.kv_cache_bytes / 2**30,
        **summarise(outcome), "scheduler_ms": scheduler_cost(outcome, int(0.95 * point.limits.max_num_seqs)),
    }  # fmt: skip


def run_points(points: Sequence[Point], jobs: int | None = None, progress: bool = False) -> list[dict[str, Any]]:
    """Simulate ``points`` in ``jobs`` processes (default: one a core); returns the rows in their order."""
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(points))
    bar = tqdm(total=len(points), unit="point", disable=None if progress else True)
    rows = []
    with bar, ProcessPoolExecutor(jobs) as pool:
        for row in pool.map(run_point, points):
            rows.append(row)
            bar.update()
    return rows


def capacity(setting: Setting, variant: str) -> float:
    """Return the requests a second that a variant serves when all of a thousand are there from the beginning."""
    row = run_point(setting.point(variant, num_requests=min(1000, setting.num_requests)))
    return row["requests"] / row["total_s"]


def length_points(setting: Setting) -> list[Point]:
    """Combined throughput by input length, all requests there at the beginning (the paper's Figure 3)."""
    return [setting.point(variant, input_tokens=n) for n in INPUT_LENGTHS for variant in setting.costs]


def rate_points(setting: Setting, burstiness: float = 1.0) -> list[Point]:
    """Latency by arrival rate (the paper's Figure 4). The first variant sets the scale."""
    best = capacity(setting, next(iter(setting.costs)))
    return [
        setting.point(variant, rate=round(load * best, 3), burstiness=burstiness)
        for load in LOADS
        for variant in setting.costs
    ]


def burst_points(setting: Setting) -> list[Point]:
    """The same with pauses of squared coefficient of variation 4."""
    return rate_points(setting, burstiness=0.25)


def budget_points(setting: Setting, load: float = 0.8) -> list[Point]:
    """Throughput and latency by the tokens of a step: all requests at once, then at a part of the capacity of each
    variant."""
    points = []
    for variant in setting.costs:
        rate = round(load * capacity(setting, variant), 3)
        for budget in CHUNK_BUDGETS:
            limits = Limits(budget, setting.limits.max_num_seqs, setting.limits.kv_cache_bytes)
            points += [setting.point(variant, limits), setting.point(variant, limits, rate=rate)]
    return points


def memory_points(setting: Setting) -> list[Point]:
    """Throughput and preemptions by the size of the pool."""
    limits = setting.limits
    return [
        setting.point(variant, Limits(limits.max_num_tokens, limits.max_num_seqs, gib * 2**30))
        for gib in POOL_GIB
        for variant in setting.costs
    ]


EXPERIMENTS = {
    "lengths": length_points, "rates": rate_points, "bursts": burst_points, "budgets": budget_points,
    "memory": memory_points,
}  # fmt: skip
