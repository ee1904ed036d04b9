"""Workloads served by a real engine and by the simulator: how far apart they are."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvforge.bench.workload import FIRST_TOKEN_ID
from kvforge.common.errors import KvforgeError
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from perf.simulation.arrivals import Traffic, arrival_times
from perf.simulation.cost_model import CostModel
from perf.simulation.measure import StepMeter, slowness
from perf.simulation.simulator import Limits, simulate


@dataclass(frozen=True)
class Times:
    """Of a workload, in seconds: to the last token of all; to the first token and for each further one, mean over
    requests."""

    total: float
    ttft: float
    tpot: float

    @classmethod
    def of(cls, traffic: Traffic, arrival: np.ndarray, first: np.ndarray, last: np.ndarray) -> "Times":
        """Return those of requests whose ``[num_requests]`` arrivals, first and last tokens are given."""
        tpot = (last - first) / max(1, traffic.output_tokens - 1)
        return cls(float(last.max()), float((first - arrival).mean()), float(tpot.mean()))


def serve(engine: LLMEngine, traffic: Traffic, seed: int) -> Times:
    """Serve ``traffic`` in real time; returns what it took."""
    arrival, rng = arrival_times(traffic, seed), np.random.default_rng(seed)
    prompts = rng.integers(FIRST_TOKEN_ID, engine.config.vocab_size, (traffic.num_requests, traffic.input_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=traffic.output_tokens, ignore_eos=True)
    first_token, last_token = np.full((2, traffic.num_requests), np.nan)
    num_arrived = 0
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
            if output.new_token_ids:
                last_token[request] = time.perf_counter() - started
                if np.isnan(first_token[request]):
                    first_token[request] = last_token[request]
    return Times.of(traffic, arrival, first_token, last_token)


def validate(
    engine: LLMEngine, costs: CostModel, chosen: Mapping[str, Traffic], seed: int = 0, rounds: int = 3
) -> list[dict[str, Any]]:
    """Serve every workload that fits the engine both ways; one row each, times in seconds, errors relative.

    A shared machine is not as fast as when its steps were priced: before and after each workload a few reference steps
    tell how much slower it is, and their mean goes into the simulated times (``slowness``, with both in the row). A
    served workload has no part in its own simulation. Each is served ``rounds`` times, all after the others each time;
    the row is that of the round whose total time has the median error.
    """
    config = engine.config
    limits = Limits(config.max_num_tokens, config.max_num_seqs, config.num_pages * costs.page_bytes)
    meter = StepMeter(engine)
    serve(engine, Traffic(1, 64, 2), seed)
    slowness(meter, costs)  # warms up
    fitting = {
        name: traffic
        for name, traffic in chosen.items()
        if traffic.input_tokens + traffic.output_tokens <= config.max_seq_len
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in fitting}
    for name, traffic in list(fitting.items()) * rounds:
        before = slowness(meter, costs)
        measured = asdict(serve(engine, traffic, seed))
        after = slowness(meter, costs)
        factor = (before + after) / 2
        outcome = simulate(costs.slower(factor), traffic, limits, seed)
        simulated = asdict(Times.of(traffic, outcome.arrival, outcome.first_token, outcome.last_token))
        row: dict[str, Any] = {"workload": name, **asdict(traffic), "slowness": [before, after]}
        for what, seconds in measured.items():
            row |= {f"measured_{what}_s": seconds, f"simulated_{what}_s": simulated[what]}
            row[f"{what}_error"] = simulated[what] / seconds - 1
        found[name].append(row)
    return [sorted(rows, key=lambda row: row["total_error"])[len(rows) // 2] for rows in found.values()]
