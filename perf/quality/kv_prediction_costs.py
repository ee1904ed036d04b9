"""FLOPs of a prompt and its first token where a part of its cache is predicted, and the time to that token."""

import time
from collections.abc import Sequence
from pathlib import Path

from kvforge.common.exact_intervals import ExactTokens, Intervals
from kvforge.costs.flops import full_token, full_token_below, prompt_flops
from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine, SamplingParams
from model_defs import ModelConfig
from perf.harness.batch import Batch


def flops(engine: Path, num_tokens: int, exact: ExactTokens | None) -> float:
    """Return the FLOPs of a prompt and its first token."""
    manifest = load_manifest(engine)
    shape = manifest.model
    if not manifest.predicts or exact is None:
        return prompt_flops(shape, num_tokens)
    predicted = manifest.prefill_flops_per_token(num_tokens) * num_tokens
    return predicted + _computed(shape, exact.intervals(num_tokens, _any_importance(num_tokens)), num_tokens)


def _any_importance(num_tokens: int) -> list[float]:
    """Blocks in the middle first: where they are changes a token's attention alone."""
    return [-abs(index - num_tokens / 2) for index in range(num_tokens)]


def _computed(shape: ModelConfig, intervals: Intervals, num_tokens: int) -> float:
    head = full_token(shape, num_tokens).vocabulary
    return head + sum(full_token_below(shape, (start + end + 1) / 2).total * (end - start) for start, end in intervals)


def first_token_seconds(engine: Path, prompts: Sequence[Sequence[int]], exact: ExactTokens | None) -> list[float]:
    """Return the times from a request to its first token, the steps of the model itself included, of requests one after
    the other."""
    options = {} if exact is None else {"exact_tokens": exact}
    loaded = LLMEngine(engine, enable_prefix_cache=False, **options)
    times = []
    for prompt in (prompts[0], prompts[0], *prompts):  # the first two warm up
        batch = Batch(loaded, [list(prompt)], SamplingParams(temperature=0.0, max_tokens=1))
        batch.finish()
        times.append(time.perf_counter() - batch.begun)
    return times[2:]
