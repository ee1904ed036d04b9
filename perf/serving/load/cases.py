"""Requests with known right answers: prompts, sampling and what kvforge.LLM answers offline; and requests that must
be refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.manifest import load_manifest
from kvforge.runtime.llm import LLM
from kvforge.runtime.requests.params import SamplingParams
from perf.harness.engines import tokenizer_of
from perf.serving.load.prompts import make_prompts

PROMPT_TOKENS = (4, 20, 60, 150, 400)


@dataclass(frozen=True)
class Case:
    """One request and its right answer. ``sampling`` holds top_k, top_p, temperature and seed, or nothing: greedy."""

    prompt: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: dict[str, Any]
    text: str
    token_ids: tuple[int, ...]


def make_cases(engine: Path, num: int, kv_cache_gib: float, seed: int) -> list[Case]:
    """``num`` cases, a third of them sampled, all of their full length (the end of text does not end them)."""
    rng = np.random.default_rng(seed)
    tokenizer, vocab = tokenizer_of(engine), load_manifest(engine).vocab_size
    lengths = rng.choice(PROMPT_TOKENS, num).tolist()
    prompts = [make_prompts(tokenizer, vocab, 1, length, seed + i)[0] for i, length in enumerate(lengths)]
    samplings: list[dict[str, Any]] = [
        {} if i % 3 else {"top_k": int(rng.integers(2, 50)), "top_p": 0.9, "temperature": 0.8, "seed": 1000 + i}
        for i in range(num)
    ]
    max_tokens = rng.integers(1, 48, num).tolist()
    params = [
        SamplingParams(**(sampling or {"temperature": 0.0}), max_tokens=limit, ignore_eos=True)
        for sampling, limit in zip(samplings, max_tokens, strict=True)
    ]
    outputs = LLM(engine, kv_cache_gib=kv_cache_gib).generate(prompts, params, use_tqdm=False)
    return [
        Case(
            prompt, tuple(output.prompt_token_ids), limit, sampling,
            output.outputs[0].text, tuple(output.outputs[0].token_ids),
        )
        for prompt, limit, sampling, output in zip(prompts, max_tokens, samplings, outputs, strict=True)
    ]  # fmt: skip


BAD_TEXT: tuple[dict[str, Any], ...] = (
    {"text_input": "", "max_tokens": 4, "stream": True},
    {"text_input": "a", "max_tokens": -5, "stream": True},
    {"text_input": "a", "max_tokens": 4, "stream": True, "top_k": 5, "temperature": -1.0},
    {"text_input": "a b " * 20000, "max_tokens": 4, "stream": True},
    {"text_input": "a", "max_tokens": 4, "stream": True, "lora_task_id": 1},
)
"""Requests to `ensemble` that must be refused."""

BAD_TOKENS: tuple[dict[str, Any], ...] = (
    {"input_ids": [5], "input_lengths": 7, "request_output_len": 4, "streaming": True},
    {"input_ids": [5, -3], "input_lengths": 2, "request_output_len": 4, "streaming": True},
    {"input_ids": [5], "input_lengths": 1, "request_output_len": 0, "streaming": True},
    {"input_ids": [5], "input_lengths": 1, "request_output_len": 4, "runtime_top_k": 2, "runtime_top_p": 7.0},
)
"""Requests to `tensorrt_llm` that must be refused."""
