"""What each output of the Triton contract must be on a running server: one check per output, in `OUTPUTS`; a tensor
without an entry fails the test that reads the contract."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvforge import SamplingParams
from tests.support.serving.contract_probes import MAX_TOKENS, PERF_METRICS, PROMPT, Probe


@dataclass(frozen=True)
class Output:
    """When an output comes, and what it is: its shape in a request for MAX_TOKENS tokens, and a check of its values."""

    inputs: dict[str, Any]
    shape: tuple[int, ...]
    dtype: Any
    check: Callable[[Probe, np.ndarray], bool]


def _log_probs(probe: Probe) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)
    (output,) = probe.llm.generate([PROMPT], params, use_tqdm=False)
    return [entry.logprob for entry in output.outputs[0].logprobs or ()]


LOG_PROBS = 4e-3
"""What rounding may change of a log-probability, relative to the largest: two times a logit's ``model_error`` of the
largest logit, of 8 layers of 128 and less and 100 tokens."""


def _near(found: np.ndarray, expected: Any) -> bool:
    size = np.abs(expected).max()
    return np.allclose(found.reshape(-1), expected, rtol=0, atol=LOG_PROBS * size)


def _scalar(inputs: dict[str, Any], dtype: Any, check: Callable[[Probe, Any], bool]) -> Output:
    return Output(inputs, (1, 1), dtype, lambda probe, array: check(probe, array.item()))


def _is_time(probe: Probe, value: int) -> bool:
    return 1_700_000_000 * 10**9 < value < 5_000_000_000 * 10**9


VOCAB = -1
"""In a shape: the model's vocabulary."""
PERF = {"return_perf_metrics": True}
_COMMON_OUTPUTS = {
    "cum_log_probs": Output(
        {"return_log_probs": True}, (1, 1), np.float32, lambda p, a: _near(a, sum(_log_probs(p)))
    ),
    "output_log_probs": Output(
        {"return_log_probs": True}, (1, 1, MAX_TOKENS), np.float32, lambda p, a: _near(a, _log_probs(p))
    ),
    "generation_logits": Output(
        {"return_generation_logits": True}, (1, 1, MAX_TOKENS, VOCAB), np.float32,
        lambda p, a: a[0, 0].argmax(-1).tolist() == p.tokens(),
    ),
    "batch_index": _scalar({}, np.int32, lambda p, v: v == 0),
    "sequence_index": _scalar({}, np.int32, lambda p, v: v == 0),
    "kv_cache_alloc_new_blocks": _scalar(PERF, np.int32, lambda p, v: v >= 0),
    "kv_cache_reused_blocks": _scalar(PERF, np.int32, lambda p, v: v >= 0),
    "kv_cache_alloc_total_blocks": _scalar(PERF, np.int32, lambda p, v: v > 0),
    **{name: _scalar(PERF, np.int64, _is_time) for name in PERF_METRICS if name.endswith("_ns")},
    "acceptance_rate": _scalar(PERF, np.float32, lambda p, v: v == 0.0),
    "total_accepted_draft_tokens": _scalar(PERF, np.int32, lambda p, v: v == 0),
    "total_draft_tokens": _scalar(PERF, np.int32, lambda p, v: v == 0),
    "num_input_tokens": _scalar(
        {"return_num_input_tokens": True}, np.int32, lambda p, v: v == len(p.llm.tokenizer.encode(PROMPT))
    ),
    "num_output_tokens": _scalar({"return_num_output_tokens": True}, np.int32, lambda p, v: v == MAX_TOKENS),
}  # fmt: skip
_TEXT_OUTPUTS = {
    **_COMMON_OUTPUTS,
    "text_output": Output({}, (1,), np.object_, lambda p, a: a.item().decode() == p.offline()[0]),
}
OUTPUTS: dict[str, dict[str, Output]] = {
    "tensorrt_llm": {
        **_COMMON_OUTPUTS,
        "output_ids": Output({}, (1, 1, MAX_TOKENS), np.int32, lambda p, a: a[0, 0].tolist() == p.tokens()),
        "sequence_length": _scalar({}, np.int32, lambda p, v: v == MAX_TOKENS),
    },
    "ensemble": _TEXT_OUTPUTS,
    "tensorrt_llm_bls": _TEXT_OUTPUTS,
}
REFUSED_OUTPUTS = {"context_logits": "return_context_logits"}
"""Outputs that nothing fills: asking for one is refused by its flag's name."""


def assert_output_comes(probe: Probe, name: str) -> None:
    """Ask for an output of the probe's model: it has the shape, the dtype and the values that it must have."""
    assert name in OUTPUTS[probe.model], f"output {name} of {probe.model} has no check"
    output = OUTPUTS[probe.model][name]
    (response,) = probe.responses(**output.inputs)
    array = response.tensors[name]
    vocab = probe.llm.engine.config.vocab_size
    assert array.shape == tuple(vocab if size == VOCAB else size for size in output.shape), (name, array.shape)
    assert array.dtype == np.dtype(output.dtype), (name, array.dtype)
    assert output.check(probe, array), (name, array)
