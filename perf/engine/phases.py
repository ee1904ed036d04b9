"""One run of a workload on an engine, timed step by step."""

import time

import numpy as np

from kvforge.errors import KvforgeError
from kvforge.runtime import LLMEngine, SamplingParams
from perf.peers.phases import PhaseTimes


def run_phases(engine: LLMEngine, prompts: np.ndarray, output_tokens: int) -> tuple[PhaseTimes, list[list[int]]]:
    """Serve ``prompts [requests, input_tokens]`` greedily, all there from the start; returns times and output tokens.

    Raises:
        KvforgeError: a request fails.
    """
    times, outputs = PhaseTimes(), [[] for _ in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts.tolist()):
        engine.add_request(str(index), prompt, params)
    before = time.perf_counter()
    while engine.has_unfinished():
        contexts = []
        for output in engine.step():
            if output.finish_reason == "error":
                raise KvforgeError(f"a request failed: {output.stop_reason}.")
            tokens = outputs[int(output.request_id)]
            if tokens:
                contexts.append(prompts.shape[1] + len(tokens))
            tokens += output.new_token_ids
        now = time.perf_counter()
        times.add_step(now - before, engine.statistics.num_context_tokens > 0, contexts)
        if outputs[0] and not times.ttft_s:
            times.ttft_s = now - start
        before = now
    times.total_s = before - start
    times.first_tokens = [tokens[0] for tokens in outputs]
    return times, outputs
