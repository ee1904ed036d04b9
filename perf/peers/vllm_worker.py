"""vLLM's CPU backend, bf16, no prefix cache: VLLM_PYTHON -m perf.peers.vllm_worker MODEL [JSON].

The second argument is further arguments of vLLM's ``LLM``, which go before those that are here.
"""

import itertools
import json
import os
import sys

import numpy as np

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams

from perf.peers.phases import PhaseTimes
from perf.peers.protocol import Run, serve


def load() -> Run:
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    with open(os.path.join(sys.argv[1], "config.json"), encoding="utf-8") as file:
        positions = json.load(file)["max_position_embeddings"]
    arguments = {
        "dtype": "bfloat16", "max_model_len": min(16384, positions), "max_num_batched_tokens": 2048, "max_num_seqs": 64,
        "enable_prefix_caching": False, "disable_log_stats": True,
    }  # fmt: skip
    llm = LLM(sys.argv[1], **{**arguments, **given})
    engine, ids = llm.llm_engine, itertools.count()

    def run(prompts: np.ndarray, output_tokens: int) -> PhaseTimes:
        params = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        names = [str(next(ids)) for _ in prompts]
        times = PhaseTimes()
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt.tolist()}, params)
        outputs: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_unfinished_requests():
            has_prompt = not all(outputs.values())
            contexts = []
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                if outputs[output.request_id]:
                    contexts.append(prompts.shape[1] + len(tokens) - 1)
                outputs[output.request_id] = tokens
            times.lap(has_prompt, contexts, bool(outputs[names[0]]))
        for tokens in outputs.values():
            if len(tokens) != output_tokens:
                raise RuntimeError(f"{len(tokens)} of {output_tokens} tokens were generated")
            times.first_tokens.append(tokens[0])
        return times

    run(np.full((1, 2048), 3, dtype=np.int64), 4)
    return run


if __name__ == "__main__":
    serve(load)
