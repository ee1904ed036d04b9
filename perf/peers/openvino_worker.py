"""OpenVINO GenAI's continuous batching: PEERS_PYTHON -m perf.peers.openvino_worker MODEL.

Compute and KV cache in bf16 where the CPU has it for OpenVINO, else in f32, its choice for such a CPU.
"""

import itertools
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai

from perf.peers.phases import PhaseTimes
from perf.peers.protocol import Run, serve


def load() -> Run:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1, 2048, 64
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if "BF16" in capabilities else "f32"
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", properties)
    ids = itertools.count()

    def run(prompts: np.ndarray, output_tokens: int) -> PhaseTimes:
        config = genai.GenerationConfig()
        config.ignore_eos, config.do_sample = True, False
        config.max_new_tokens = config.min_new_tokens = output_tokens
        tensors = [ov.Tensor(prompt[None]) for prompt in prompts]
        times = PhaseTimes()
        handles = [pipe.add_request(next(ids), tensor, config) for tensor in tensors]
        num_outputs = [0] * len(handles)
        while pipe.has_non_finished_requests():
            has_prompt = 0 in num_outputs
            pipe.step()
            contexts = []
            for index, handle in enumerate(handles):  # one token a step from the first on
                if 0 < num_outputs[index] < output_tokens:
                    contexts.append(prompts.shape[1] + num_outputs[index])
                if num_outputs[index] or handle.can_read():
                    num_outputs[index] += 1
            times.lap(has_prompt, contexts, num_outputs[0] > 0)
        for handle in handles:
            (result,) = handle.read_all()
            if len(result.generated_ids) != output_tokens:
                raise RuntimeError(f"{len(result.generated_ids)} of {output_tokens} tokens were generated")
            times.first_tokens.append(int(result.generated_ids[0]))
        return times

    run(np.full((1, 2048), 3, dtype=np.int64), 4)
    return run


if __name__ == "__main__":
    serve(load)
