"""The numbers of a simulation that tables and figures are made of."""

from typing import Any

import numpy as np

from perf.simulation.simulator import Outcome


def distribution(values: np.ndarray) -> dict[str, float]:
    """Mean, median and 99th percentile; zeros if there are no values."""
    if len(values) == 0:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": float(values.mean()), "p50": float(p50), "p99": float(p99)}


def summarise(outcome: Outcome) -> dict[str, Any]:
    """Return throughput in tokens a second and distributions in seconds.

    TPOT is a request's time from the first token to the last over the tokens after the first; ``gap_s`` is the time
    between two tokens of a request, over all of them. All follow from the seed.
    """
    traffic, total = outcome.traffic, outcome.total
    num, out = traffic.num_requests, traffic.output_tokens
    return {
        "requests": num, "input_tokens": traffic.input_tokens, "output_tokens": out, "rate": traffic.rate,
        "burstiness": traffic.burstiness, "total_s": total,
        "combined_tok_s": num * (traffic.input_tokens + out) / total, "output_tok_s": num * out / total,
        "ttft_s": distribution(outcome.first_token - outcome.arrival),
        "queue_s": distribution(outcome.first_scheduled - outcome.arrival),
        "tpot_s": distribution((outcome.last_token - outcome.first_token) / max(1, out - 1)),
        "gap_s": distribution(outcome.token_gaps), "num_steps": len(outcome.running),
        "mean_running": float(outcome.running.mean()), "peak_running": int(outcome.running.max()),
        "num_preemptions": outcome.num_preemptions, "peak_pages": outcome.peak_pages,
    }  # fmt: skip


def scheduler_cost(outcome: Outcome, min_running: int) -> dict[str, float]:
    """Return the real milliseconds per step of the scheduler over the steps with at least ``min_running`` sequences:
    mean, p50 and p99, and how many steps that are."""
    chosen = 1e3 * outcome.scheduler_seconds[outcome.running >= min_running]
    return {"num_steps": len(chosen), **distribution(chosen)}
