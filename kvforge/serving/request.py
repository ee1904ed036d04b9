"""Reads one request to `tensorrt_llm` from its input tensors. No Triton, no torch: numpy in, plain data out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvforge.errors import RequestError
from kvforge.runtime.sampling_params import MAX_SEQUENCES
from kvforge.serving.contract import display_name, refuse_unsupported

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt of a Triton request; `params` are fields of kvforge.runtime.SamplingParams."""

    prompt: list[int]
    streaming: bool
    exclude_input: bool
    return_log_probs: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return self.params.get("n", 1)


def is_stop(tensors: Tensors) -> bool:
    """True for a request that cancels the running one of the same id."""
    return bool(_scalar(tensors, "stop", 0, False))


def parse_batch(tensors: Tensors, exclude_input_default: bool) -> list[GenerationRequest]:
    """All prompts of one Triton request (its batch dimension). Raises RequestError, naming the tensor."""
    for name, values in tensors.items():
        refuse_unsupported(name, values)
    sizes = {name: values.shape[0] for name, values in tensors.items() if values.ndim}
    if len(set(sizes.values())) > 1:
        raise RequestError(f"the input tensors have different batch sizes: {sizes}")
    batch = next(iter(sizes.values()), 0)
    return [_parse_row(tensors, row, exclude_input_default) for row in range(batch)]


def _parse_row(tensors: Tensors, row: int, exclude_input_default: bool) -> GenerationRequest:
    return GenerationRequest(
        prompt=_prompt(tensors, row),
        streaming=bool(_scalar(tensors, "streaming", row, False)),
        exclude_input=bool(_scalar(tensors, "exclude_input_in_output", row, exclude_input_default)),
        return_log_probs=bool(_scalar(tensors, "return_log_probs", row, False)),
        return_num_input_tokens=bool(_scalar(tensors, "return_num_input_tokens", row, False)),
        return_num_output_tokens=bool(_scalar(tensors, "return_num_output_tokens", row, False)),
        params=_sampling(tensors, row),
    )


def _prompt(tensors: Tensors, row: int) -> list[int]:
    if "input_ids" not in tensors:
        raise RequestError("input tensor 'input_ids' is missing")
    ids = tensors["input_ids"][row].reshape(-1)
    length = _scalar(tensors, "input_lengths", row, None)
    if length is None:
        raise RequestError("input tensor 'input_lengths' is missing")
    if not 0 <= length <= ids.size:
        raise RequestError(f"input tensor 'input_lengths' is {length}, but 'input_ids' has {ids.size} tokens")
    if length == 0:
        raise RequestError("the prompt is empty: send at least one token")
    return ids[:length].tolist()


def _sampling(tensors: Tensors, row: int) -> dict[str, Any]:
    """Fields of SamplingParams. Without top-k and top-p the choice is greedy, as in TensorRT-LLM."""
    max_tokens = _scalar(tensors, "request_output_len", row, None)
    if max_tokens is None:
        raise RequestError(f"input tensor {display_name('request_output_len')} is missing")
    if max_tokens <= 0:
        raise RequestError(f"{display_name('request_output_len')} must be at least 1, not {max_tokens}")
    params: dict[str, Any] = {"max_tokens": max_tokens, "n": _scalar(tensors, "num_return_sequences", row, 1)}
    if not 1 <= params["n"] <= MAX_SEQUENCES:
        raise RequestError(f"'num_return_sequences' must be 1 to {MAX_SEQUENCES}, not {params['n']}")

    top_k = _scalar(tensors, "runtime_top_k", row, 0)
    top_p = _scalar(tensors, "runtime_top_p", row, 0.0)
    if top_k == 0 and top_p == 0.0:
        params["temperature"] = 0.0
        _check_temperature(_scalar(tensors, "temperature", row, 1.0))
    else:
        params["temperature"] = _check_temperature(_scalar(tensors, "temperature", row, 1.0))
        params["top_k"] = top_k
        params["top_p"] = top_p if top_p != 0.0 else 1.0
        params["seed"] = _scalar(tensors, "seed", row, 0)

    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"):
        if (value := _scalar(tensors, name, row, None)) is not None:
            params[name] = value
    end_id = _scalar(tensors, "end_id", row, None)
    if end_id is not None:
        params["ignore_eos"] = True
        params["stop_token_ids"] = [end_id] if end_id >= 0 else []
    for name, key in (("stop_words_list", "stop_words_ids"), ("bad_words_list", "bad_words_ids")):
        if name in tensors and (words := decode_words(name, tensors[name][row])):
            params[key] = words
    if _scalar(tensors, "return_log_probs", row, False):
        params["logprobs"] = 0
    return params


def _check_temperature(value: float) -> float:
    if not value >= 0.0:
        raise RequestError(f"'temperature' must be 0 or more, not {value}")
    return value


def _scalar(tensors: Tensors, name: str, row: int, default: Any) -> Any:
    """The one value of a [batch, 1] tensor as a Python number, or `default` when it was not sent."""
    if name not in tensors:
        return default
    values = tensors[name][row].reshape(-1)
    if values.size != 1:
        raise RequestError(f"input tensor {display_name(name)} must hold one value, not {values.size}")
    return values[0].item()


def encode_words(words: list[list[int]]) -> np.ndarray:
    """[2, n] int32: all words' token ids one after another, and each word's end offset, padded with -1."""
    flat = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist() if words else []
    return np.array([flat, ends + [-1] * (len(flat) - len(ends))], dtype=np.int32).reshape(2, len(flat))


def decode_words(name: str, table: np.ndarray) -> list[list[int]]:
    """The inverse of `encode_words`. Raises RequestError when the offsets do not fit the ids."""
    if table.ndim != 2 or table.shape[0] != 2:
        raise RequestError(f"input tensor {display_name(name)} must have shape [2, n]")
    ids, offsets = table.tolist()
    words, start = [], 0
    for end in offsets:
        if end == -1:
            break
        if not start < end <= len(ids):
            raise RequestError(f"input tensor {display_name(name)} has offsets that do not fit its ids")
        words.append(ids[start:end])
        start = end
    return words
