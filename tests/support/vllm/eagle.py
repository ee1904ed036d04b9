"""Runs under vLLM's interpreter: greedy tokens of a model with an EAGLE-3 head, and the drafts that vLLM makes by it.

`python eagle.py JOB RESULT`, both JSON files. A job has `checkpoint`, `head`, `prompts` (token ids), `max_tokens` and
`num_drafts`. The result has of each prompt `tokens`, `drafts` (pairs: tokens that the sequence had, the drafts behind
them) and `accepted`, vLLM's own counter: how many drafts in each place it took.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    job = json.loads(Path(sys.argv[1]).read_text())
    seen: list[tuple[int, list[int]]] = []
    propose = SpecDecodeBaseProposer.propose

    def noted(self: Any, *args: Any, **named: Any) -> Any:
        positions, last = named["target_positions"], named["token_indices_to_sample"]
        place = int(positions[-1 if last is None else int(last[0])])
        drafts = propose(self, *args, **named)
        seen.append((place + 2, drafts[0].tolist()))
        return drafts

    llm = LLM(
        job["checkpoint"],
        speculative_config={"method": "eagle3", "model": job["head"], "num_speculative_tokens": job["num_drafts"]},
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
    )
    SpecDecodeBaseProposer.propose = noted  # what is drafted while warming up is not noted
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    results, before = [], [0] * job["num_drafts"]
    for prompt in job["prompts"]:
        seen.clear()
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
        counters = {metric.name: metric for metric in llm.get_metrics()}
        counted = counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        accepted = [int(now - then) for now, then in zip(counted, before, strict=True)]
        results.append({"tokens": list(output.token_ids), "drafts": seen.copy(), "accepted": accepted})
        before = counted
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
