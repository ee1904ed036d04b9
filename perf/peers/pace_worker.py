"""AMD's PACE, all prompts in one batch: PACE_PYTHON -m perf.peers.pace_worker MODEL.

Its kernels, its caches for serving and its bf16 rotations are AVX-512. Where a CPU lacks AVX512-BF16, the worker takes
float32 and a contiguous cache, for which PACE falls back to torch's products and norms and to oneDNN's attention.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pace.llm
import torch

from perf.peers.phases import PhaseTimes
from perf.peers.protocol import Run, serve

EOS = 2
"""PACE wants one; no prompt has it, or it would count as padding."""


class Steps:
    """A text streamer as PACE calls it: the prompts, then a token int64 [requests, 1] of each request a step."""

    def __init__(self, input_tokens: int) -> None:
        self._input_tokens, self._step = input_tokens, -1
        self.times = PhaseTimes()

    def put(self, tokens: torch.Tensor) -> None:
        if self._step == 0:
            self.times.first_tokens = tokens[:, 0].tolist()
        if self._step >= 0:
            contexts = [self._input_tokens + self._step] * len(tokens) if self._step else []
            self.times.lap(not self._step, contexts, is_first=not self._step)
        self._step += 1

    def end(self) -> None:
        """PACE says so behind the last token."""


def load() -> Run:
    model = pace.llm.LLMModel(sys.argv[1], disable_tqdm=True, **choices())

    def run(prompts: np.ndarray, output_tokens: int) -> PhaseTimes:
        steps = Steps(prompts.shape[1])
        config = pace.llm.SamplingConfig(
            max_new_tokens=output_tokens, ignore_eos=True, do_sample=False, eos_token_id=EOS, pad_token_id=EOS
        )
        ids = model.generate(torch.from_numpy(prompts), config, steps).output_token_ids
        if ids.shape[1] != prompts.shape[1] + output_tokens:
            raise RuntimeError(f"{ids.shape[1] - prompts.shape[1]} of {output_tokens} tokens were generated")
        return steps.times

    run(np.full((1, 2048), 3, dtype=np.int64), 4)
    return run


def choices() -> dict[str, Any]:
    """The dtype and the cache that this CPU can have."""
    if " avx512_bf16" in Path("/proc/cpuinfo").read_text():
        return {"dtype": torch.bfloat16, "kv_cache_type": pace.llm.KVCacheType.SLAB_POOL}
    return {"dtype": torch.float32, "kv_cache_type": pace.llm.KVCacheType.BMC}


if __name__ == "__main__":
    serve(load)
