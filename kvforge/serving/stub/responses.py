"""Builds the output tensors of one response of `tensorrt_llm`, as arrays by name; only the requested ones."""

import json
from collections.abc import Callable, Set
from typing import Any

import numpy as np

from kvforge.runtime.requests.prompt_scores import PromptScores
from kvforge.serving.contract.failures import Failure
from kvforge.serving.contract.response_fields import ERROR, FINISH_REASON, STOP_REASON
from kvforge.serving.contract.text_rows import REQUEST_END, SEQUENCE_END, RowMessage
from kvforge.serving.stub.active import ActiveRequest, Chunk, Pending

IN_ROWS = frozenset({"output_ids", "sequence_length", FINISH_REASON, STOP_REASON})
"""What a text model's row says without arrays."""

Builder = Callable[[ActiveRequest, Chunk], np.ndarray | None]

# Fields of RequestMetrics under the contract's names, as they are with each response. In place of a number above
# those of the contract's type there is the largest of these.
PERF_METRICS = {
    "kv_cache_alloc_new_blocks": ("num_new_pages", np.int32),
    "kv_cache_reused_blocks": ("num_reused_pages", np.int32),
    "kv_cache_alloc_total_blocks": ("num_allocated_pages", np.int32),
    "arrival_time_ns": ("arrival_time_ns", np.int64),
    "first_scheduled_time_ns": ("first_scheduled_time_ns", np.int64),
    "first_token_time_ns": ("first_token_time_ns", np.int64),
    "last_token_time_ns": ("last_token_time_ns", np.int64),
}
DRAFT_METRICS = {
    "total_accepted_draft_tokens": ("num_accepted_draft_tokens", np.int32),
    "total_draft_tokens": ("num_draft_tokens", np.int32),
}


def chunk_arrays(active: ActiveRequest, chunk: Chunk) -> dict[str, np.ndarray]:
    """Tensors of TensorRT-LLM's contract, each with the batch dimension: for n new tokens of one sequence,
    output_ids [1, 1, n], sequence_length [1, 1], output_log_probs [1, 1, n], cum_log_probs [1, 1],
    generation_logits [1, 1, n, vocab], top_log_probs and their ids [1, n, k], all others [1, 1]; and with the first
    response, of a prompt of m + 1 tokens, prompt_log_probs and their ranks [1, m], prompt_top_log_probs and their ids
    [1, m, k]. They come in the order of config.pbtxt, by which some clients read them.
    """
    arrays = {}
    for name, builder in BUILDERS.items():
        if name in active.outputs and (array := builder(active, chunk)) is not None:
            arrays[name] = array
    return arrays


def add_row(message: RowMessage, active: ActiveRequest, chunk: Chunk) -> None:
    """The same for a text model: tokens, and what else was asked for."""
    flags = (REQUEST_END if chunk.final else 0) | (SEQUENCE_END if chunk.end else 0)
    number = active.sequences.index(chunk.sequence)
    arrays = {} if active.outputs <= IN_ROWS else chunk_arrays(active, chunk)
    more = {name: array for name, array in arrays.items() if name not in IN_ROWS}
    message.add(active.key, number, flags, chunk.tokens, chunk.context, more)


def failure_arrays(outputs: Set[str], failure: Failure) -> dict[str, np.ndarray]:
    """A last response that says what went wrong, in place of an error."""
    arrays = {
        "output_ids": np.zeros((1, 1, 0), dtype=np.int32),
        "sequence_length": _int32(0),
        FINISH_REASON: _text(ERROR),
        STOP_REASON: _text(json.dumps(failure.to_json())),
    }
    return {name: array for name, array in arrays.items() if name in outputs}


def _output_log_probs(active: ActiveRequest, chunk: Chunk) -> np.ndarray | None:
    if not chunk.sequence.request.return_log_probs:
        return None
    return np.array(chunk.new.log_probs, dtype=np.float32).reshape(1, 1, -1)


def _cum_log_probs(active: ActiveRequest, chunk: Chunk) -> np.ndarray | None:
    if not chunk.sequence.request.return_log_probs:
        return None
    return np.array([[chunk.cum_log_prob]], dtype=np.float32)


def _generation_logits(active: ActiveRequest, chunk: Chunk) -> np.ndarray | None:
    if not chunk.sequence.request.return_generation_logits or not chunk.new.logits:
        return None
    return np.concatenate(chunk.new.logits)[None, None]


def _top(numbers: Callable[[Pending], Any], dtype: type) -> Builder:
    def build(active: ActiveRequest, chunk: Chunk) -> np.ndarray | None:
        count, new = chunk.sequence.request.num_top_log_probs, chunk.new
        if not count:
            return None
        values = np.array(numbers(new), dtype=dtype)
        width = len(values) // len(new.tokens) if len(values) else count  # a small vocabulary has fewer
        return values.reshape(1, -1, width)

    return build


def _finish_reason(active: ActiveRequest, chunk: Chunk) -> np.ndarray | None:
    """Only with the end: tensors of text are slow to build, and clients ask for all outputs by default."""
    return _text(chunk.sequence.finish_reason or "") if chunk.end else None


def _stop_reason(active: ActiveRequest, chunk: Chunk) -> np.ndarray | None:
    return _text(json.dumps(chunk.sequence.stop_reason)) if chunk.end else None


def _metric(field: str, dtype: type) -> Builder:
    def build(active: ActiveRequest, chunk: Chunk) -> np.ndarray | None:
        metrics = _metrics(chunk)
        return None if metrics is None else np.array([[min(metrics[field], np.iinfo(dtype).max)]], dtype=dtype)

    return build


def _acceptance_rate(active: ActiveRequest, chunk: Chunk) -> np.ndarray | None:
    """Accepted draft tokens per draft token, 0 without drafts."""
    metrics = _metrics(chunk)
    if metrics is None:
        return None
    rate = metrics["num_accepted_draft_tokens"] / max(metrics["num_draft_tokens"], 1)
    return np.array([[rate]], dtype=np.float32)


def _metrics(chunk: Chunk) -> dict[str, int] | None:
    return chunk.sequence.metrics if chunk.sequence.request.return_perf_metrics else None


def _int32(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.int32)


def _text(value: str) -> np.ndarray:
    return np.array([[value.encode()]], dtype=np.object_)


def _count(wanted: str, value: Callable[[Chunk], int]) -> Builder:
    return lambda active, chunk: _int32(value(chunk)) if getattr(chunk.sequence.request, wanted) else None


def _of_prompt(array: Callable[[PromptScores], np.ndarray]) -> Builder:
    return lambda active, chunk: None if chunk.prompt_scores is None else array(chunk.prompt_scores)[None]


BUILDERS: dict[str, Builder] = {
    "output_ids": lambda active, chunk: np.array(chunk.tokens, dtype=np.int32).reshape(1, 1, -1),
    "sequence_length": lambda active, chunk: _int32(len(chunk.tokens)),
    "cum_log_probs": _cum_log_probs,
    "output_log_probs": _output_log_probs,
    "generation_logits": _generation_logits,
    "batch_index": lambda active, chunk: _int32(chunk.sequence.batch_index),
    "sequence_index": lambda active, chunk: _int32(chunk.sequence.sequence_index),
    **{name: _metric(field, dtype) for name, (field, dtype) in PERF_METRICS.items()},
    "acceptance_rate": _acceptance_rate,
    **{name: _metric(field, dtype) for name, (field, dtype) in DRAFT_METRICS.items()},
    "num_input_tokens": _count("return_num_input_tokens", lambda chunk: len(chunk.sequence.request.prompt)),
    "num_output_tokens": _count("return_num_output_tokens", lambda chunk: chunk.num_output_tokens),
    FINISH_REASON: _finish_reason,
    STOP_REASON: _stop_reason,
    "top_log_probs_ids": _top(lambda new: new.top_ids, np.int32),
    "top_log_probs": _top(lambda new: new.top, np.float32),
    "prompt_log_probs": _of_prompt(lambda scores: scores.logprobs),
    "prompt_log_probs_ranks": _of_prompt(lambda scores: scores.ranks),
    "prompt_top_log_probs_ids": _of_prompt(lambda scores: scores.top_ids),
    "prompt_top_log_probs": _of_prompt(lambda scores: scores.top),
}
"""In the order of config.pbtxt."""
