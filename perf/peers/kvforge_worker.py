"""This project's engine as a worker: python -m perf.peers.kvforge_worker ENGINE."""

import sys

import numpy as np

from kvforge.runtime.engine import LLMEngine
from perf.engine.phases import run_phases
from perf.peers.phases import PhaseTimes
from perf.peers.protocol import Run, serve

KV_CACHE_GIB = 0.5
"""Twice what the workloads need; all systems stay loaded side by side."""


def load() -> Run:
    engine = LLMEngine(sys.argv[1], enable_prefix_cache=False, kv_cache_gib=KV_CACHE_GIB)

    def run(prompts: np.ndarray, output_tokens: int) -> PhaseTimes:
        return run_phases(engine, prompts, output_tokens)[0]

    run(np.full((1, min(2048, engine.config.max_seq_len // 2)), 3), 4)
    return run


if __name__ == "__main__":
    serve(load)
