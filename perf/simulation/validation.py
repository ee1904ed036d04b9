"""Workloads served by a real engine and by the simulator: how far apart they are."""

import time
from dataclasses import asdict
from typing import Any

import numpy as np

from kvforge.bench.workload import FIRST_TOKEN_ID
from kvforge.common.errors import KvforgeError
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from perf.simulation.arrivals import Traffic, arrival_times
from perf.simulation.cost_model import CostModel
from perf.simulation.simulator import Limits, simulate

WORKLOADS = {
    "chat": Traffic(8, 256, 64),
    "prompts": Traffic(4, 1000, 16),
    "many": Traffic(32, 100, 24),
    "arriving": Traffic(16, 200, 24, rate=2.0),
}


def serve(engine: LLMEngine, traffic: Traffic, seed: int) -> tuple[np.ndarray, float]:
    """Serve ``traffic`` in real time; returns each request's time to its first token and the total, in seconds."""
    arrival, rng = arrival_times(traffic, seed), np.random.default_rng(seed)
    prompts = rng.integers(FIRST_TOKEN_ID, engine.config.vocab_size, (traffic.num_requests, traffic.input_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=traffic.output_tokens, ignore_eos=True)
    first_token, num_arrived = np.full(traffic.num_requests, np.nan), 0
    started = time.perf_counter()
    while num_arrived < traffic.num_requests or engine.has_unfinished():
        now = time.perf_counter() - started
        if num_arrived < traffic.num_requests and not engine.has_unfinished():
            time.sleep(max(0.0, arrival[num_arrived] - now))
            now = max(now, float(arrival[num_arrived]))
        while num_arrived < traffic.num_requests and arrival[num_arrived] <= now:
            engine.add_request(f"validation-{num_arrived}", prompts[num_arrived].tolist(), params)
            num_arrived += 1
        for output in engine.step():
            if output.finish_reason == "error":
                raise KvforgeError(f"a request of the validation failed: {output.stop_reason}.")
            request = int(output.request_id.rpartition("-")[2])
            if output.new_token_ids and np.isnan(first_token[request]):
                first_token[request] = time.perf_counter() - started
    return first_token - arrival, time.perf_counter() - started


def validate(engine: LLMEngine, costs: CostModel, seed: int = 0) -> list[dict[str, Any]]:
    """Serve every workload that fits the engine both ways; one row each, times in seconds, errors relative."""
    config, rows = engine.config, []
    limits = Limits(config.max_num_tokens, config.max_num_seqs, config.num_pages * costs.page_bytes)
    serve(engine, Traffic(1, 64, 2), seed)
    for name, traffic in WORKLOADS.items():
        if traffic.input_tokens + traffic.output_tokens > config.max_seq_len:
            continue
        ttft, total = serve(engine, traffic, seed)
        outcome = simulate(costs, traffic, limits, seed)
        simulated_ttft = outcome.first_token - outcome.arrival
        rows.append(
            {
                "workload": name,
                **asdict(traffic),
                "measured_total_s": total,
                "simulated_total_s": outcome.total,
                "total_error": outcome.total / total - 1,
                "measured_ttft_s": float(ttft.mean()),
                "simulated_ttft_s": float(simulated_ttft.mean()),
                "ttft_error": float(simulated_ttft.mean() / ttft.mean() - 1),
            }
        )
    return rows
