"""Reads one request to `tensorrt_llm` from its input tensors. No Triton, no torch: numpy in, plain data out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.common.refusals import PROMPT
from kvforge.serving.contract.inputs import refuse_unsupported
from kvforge.serving.contract.sampling import num_top_log_probs, sampling_fields
from kvforge.serving.contract.tensors import Tensors, scalar


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt of a Triton request; `params` are fields of kvforge.runtime.SamplingParams."""

    prompt: list[int]
    streaming: bool
    exclude_input: bool
    return_log_probs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_perf_metrics: bool = False
    return_generation_logits: bool = False
    num_top_log_probs: int = 0
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return self.params.get("n", 1)


def is_stop(tensors: Tensors) -> bool:
    """True for a request that cancels the running one of the same id."""
    return bool(scalar(tensors, "stop", 0, False))


def wrap_token_ids(tensors: Tensors, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors with every token id of a prompt inside the vocabulary, for load generators that draw any number."""
    ids = tensors.get("input_ids")
    return dict(tensors) if ids is None else {**tensors, "input_ids": ids % vocab_size}


def parse_batch(
    tensors: Tensors, exclude_input_default: bool, stop_token_ids: Sequence[int] = (), end_id: int | None = None
) -> list[GenerationRequest]:
    """All prompts of one Triton request (its batch dimension), with the stop tokens of its parameters and the model's
    `end_id`. Raises RequestError, naming the tensor."""
    for name, values in tensors.items():
        refuse_unsupported(name, values)
    sizes = {name: values.shape[0] for name, values in tensors.items() if values.ndim}
    if len(set(sizes.values())) > 1:
        raise RequestError(f"the input tensors have different batch sizes: {sizes}")
    batch = next(iter(sizes.values()), 0)
    return [_parse_row(tensors, row, exclude_input_default, stop_token_ids, end_id) for row in range(batch)]


def check_one_response(prompts: Sequence[GenerationRequest]) -> None:
    """Raise RequestError where a request has more than the one response of a server without the decoupled mode."""
    if any(prompt.streaming for prompt in prompts):
        raise RequestError(
            "Streaming is only supported if model is deployed using decoupled mode",
            "leave out 'streaming' ('stream' of ensemble)",
            operator="start the server without --no-decoupled",
        )
    if len(prompts) > 1 or any(prompt.num_sequences > 1 for prompt in prompts):
        raise RequestError(
            "several prompts in a request, and several sequences of one, have a response each",
            "send one prompt and 'num_return_sequences' 1",
            operator="start the server without --no-decoupled",
        )


def _parse_row(
    tensors: Tensors, row: int, exclude_input_default: bool, stop_token_ids: Sequence[int], end_id: int | None
) -> GenerationRequest:
    def flag(name: str, default: bool = False) -> bool:
        return bool(scalar(tensors, name, row, default))

    return GenerationRequest(
        prompt=_prompt(tensors, row),
        streaming=flag("streaming"),
        exclude_input=flag("exclude_input_in_output", exclude_input_default),
        return_log_probs=flag("return_log_probs"),
        return_num_input_tokens=flag("return_num_input_tokens"),
        return_num_output_tokens=flag("return_num_output_tokens"),
        return_perf_metrics=flag("return_perf_metrics"),
        return_generation_logits=flag("return_generation_logits"),
        num_top_log_probs=num_top_log_probs(tensors, row),
        params=sampling_fields(tensors, row, stop_token_ids, end_id),
    )


def _prompt(tensors: Tensors, row: int) -> list[int]:
    if "input_ids" not in tensors:
        raise RequestError("is missing", field="input_ids")
    ids = tensors["input_ids"][row].reshape(-1)
    length = scalar(tensors, "input_lengths", row, None)
    if length is None:
        raise RequestError("is missing", field="input_lengths")
    if not 0 <= length <= ids.size:
        raise RequestError(f"is {length}, but 'input_ids' has {ids.size} tokens", field="input_lengths")
    if length == 0:
        raise RequestError("is empty", "send at least one token", field=PROMPT)
    return ids[:length].tolist()
