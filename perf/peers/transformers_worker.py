"""Hugging Face transformers, one batch, bf16: PEERS_PYTHON -m perf.peers.transformers_worker MODEL."""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from perf.peers.phases import PhaseTimes
from perf.peers.protocol import Run, serve


def load() -> Run:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(prompts: np.ndarray, output_tokens: int) -> PhaseTimes:
        requests, input_tokens = prompts.shape
        ids = torch.from_numpy(prompts)
        times = PhaseTimes()
        out = model(ids, use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        times.first_tokens = token[:, 0].tolist()
        times.lap(True, is_first=True)
        for step in range(1, output_tokens):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            times.lap(False, [input_tokens + step] * requests)
        return times

    run(np.full((1, 64), 3), 2)
    return run


if __name__ == "__main__":
    serve(load)
