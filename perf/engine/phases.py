"""One run of a workload on an engine, timed step by step."""

import numpy as np

from kvforge.runtime.engine import LLMEngine
from perf.harness.batch import Batch
from perf.peers.phases import PhaseTimes


def run_phases(engine: LLMEngine, prompts: np.ndarray, output_tokens: int) -> tuple[PhaseTimes, list[list[int]]]:
    """Serve ``prompts [requests, input_tokens]`` greedily, all there from the start; returns times and output tokens.

    Raises:
        KvforgeError: a request fails.
    """
    times = PhaseTimes()
    batch = Batch(engine, prompts.tolist(), output_tokens)
    while engine.has_unfinished():
        lengths = [len(tokens) for tokens in batch.tokens]
        batch.step()
        grown = zip(lengths, batch.tokens, strict=True)
        contexts = [prompts.shape[1] + length for length, tokens in grown if 0 < length < len(tokens)]
        times.lap(engine.statistics.num_context_tokens > 0, contexts, bool(batch.tokens[0]))
    times.first_tokens = [tokens[0] for tokens in batch.tokens]
    return times, batch.tokens
