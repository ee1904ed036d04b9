"""Runs under vLLM's interpreter: greedy tokens of one checkpoint, and what its layers above the cut computed.

`python generate.py JOB RESULT`, both JSON files. A job has `checkpoint`, `prompts` (token ids), `max_tokens`,
`fast_prefill`, `tensor_parallel_size` and `pipeline_parallel_size`. The result has `tokens` and, of one process,
`num_pages` and `cache_bytes_per_token`, of the tensors that vLLM has made; with a cut also `num_upper_rows`, the tokens
that ran the last layer, warming up left out.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        job["checkpoint"],
        dtype="float32",
        tensor_parallel_size=job["tensor_parallel_size"],
        pipeline_parallel_size=job["pipeline_parallel_size"],
        kv_sharing_fast_prefill=job["fast_prefill"],
        enforce_eager=True,
        max_num_batched_tokens=64,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    rows: list[int] = []
    result = {}
    if job["tensor_parallel_size"] * job["pipeline_parallel_size"] == 1:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        model = runner.model
        if hasattr(model, "single_input"):
            model.layers[str(model.config.num_layers - 1)].down.register_forward_pre_hook(
                lambda module, args: rows.append(len(args[0]))
            )
        caches = {cache.data_ptr(): cache for cache in runner.kv_caches}.values()
        slots = {cache.shape[0] * cache.shape[2] for cache in caches}
        result["cache_bytes_per_token"] = sum(c.numel() * c.element_size() for c in caches) // max(slots)
        result["num_pages"] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False)
    result |= {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "num_upper_rows": sum(rows)}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
