"""The sampling tensors of `tensorrt_llm` as fields of kvforge.runtime.SamplingParams."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.common.sampling_fields import SAMPLING_FIELDS
from kvforge.runtime.requests.checks import MAX_BIAS_TOKENS, MAX_DRAFT_TOKENS, MAX_RANGES, MAX_WORDS
from kvforge.runtime.requests.params import SamplingParams
from kvforge.serving.contract.inputs import TENSORS, refuse
from kvforge.serving.contract.tensors import Tensors, check_entries, scalar, text, texts, vector
from kvforge.serving.contract.word_lists import decode_words

MAX_TOP_LOG_PROBS = 20

RETENTION = tuple(f"retention_token_range_{part}" for part in ("starts", "ends", "priorities"))


def sampling_fields(
    tensors: Tensors, row: int, stop_token_ids: Sequence[int] = (), end_id: int | None = None
) -> dict[str, Any]:
    """Fields of SamplingParams for one row of the batch, checked; `stop_token_ids` come from the request's parameters.
    `end_id` is what preprocessing says for the model's end tokens: it stands for all of them. Raises RequestError,
    naming the tensor.

    Without top-k and top-p the choice is greedy, as in TensorRT-LLM, whatever the temperature.
    """
    params: dict[str, Any] = {
        "max_tokens": scalar(tensors, "request_output_len", row, None),
        "n": scalar(tensors, "num_return_sequences", row, 1),
    }
    if params["max_tokens"] is None:
        raise RequestError("is missing", field="max_tokens")
    for name, number in SAMPLING_FIELDS.items():
        if (value := scalar(tensors, number.tensor or name, row, None)) is not None:
            params[name] = value
    if params.get("top_p") == 0.0:
        del params["top_p"]
    if params.get("top_p_min") == 0.0:
        del params["top_p_min"]
    own_end_id = scalar(tensors, "end_id", row, None)
    if own_end_id is not None and own_end_id != end_id:
        params["ignore_eos"] = True
        params["stop_token_ids"] = [own_end_id] if own_end_id >= 0 else []
    if stop_token_ids:
        params["stop_token_ids"] = [*params.get("stop_token_ids", ()), *stop_token_ids]
    for field in ("stop_words_ids", "bad_words_ids"):
        name = TENSORS[field]
        if name in tensors and (words := decode_words(name, tensors[name][row])):
            params[field] = words
    if stop := texts(tensors, "stop_strings", row, MAX_WORDS):
        params["stop"] = stop
    if drafts := vector(tensors, "draft_input_ids", row, MAX_DRAFT_TOKENS):
        params["draft_token_ids"] = drafts
    if bias := _bias(tensors, row):
        params["logit_bias"] = bias
    if retention := _retention(tensors, row):
        params["retention"] = retention
    if guide := _guide(tensors, row):
        params["guided_decoding"] = guide
    if scalar(tensors, "return_generation_logits", row, False):
        params["return_logits"] = True
    num_of_prompt = _num_log_probs(tensors, row, "num_prompt_log_probs", -1)
    if num_of_prompt >= 0:
        params["prompt_logprobs"] = num_of_prompt
    num_top = num_top_log_probs(tensors, row)
    if num_top or scalar(tensors, "return_log_probs", row, False):
        params["logprobs"] = num_top
    SamplingParams(**params)  # refuses what is wrong, by its own names of the fields
    if params.get("top_k", 0) == 0 and "top_p" not in params:
        params["temperature"] = 0.0
        params.pop("top_k", None)
    else:
        params["seed"] = scalar(tensors, "seed", row, 0)
    return params


def num_top_log_probs(tensors: Tensors, row: int) -> int:
    """How many of the most probable tokens are asked for beside each generated one."""
    return _num_log_probs(tensors, row, "num_top_log_probs", 0)


def _num_log_probs(tensors: Tensors, row: int, name: str, least: int) -> int:
    """A number of most probable tokens, ``least`` where it is not given and at least."""
    value = scalar(tensors, name, row, least)
    if not least <= value <= MAX_TOP_LOG_PROBS:
        raise refuse(name, f"must be {least} to {MAX_TOP_LOG_PROBS}, not {value}")
    return value


def _bias(tensors: Tensors, row: int) -> dict[int, float]:
    """The tokens of a dense [vocab] bias whose number is not 0."""
    if "embedding_bias" not in tensors:
        return {}
    values = tensors["embedding_bias"][row].reshape(-1)
    ids = np.flatnonzero(values)
    check_entries("embedding_bias", ids.size, MAX_BIAS_TOKENS)
    return dict(zip(ids.tolist(), values[ids].tolist(), strict=True))


def _retention(tensors: Tensors, row: int) -> list[tuple[int, int, int]]:
    parts = [vector(tensors, name, row, MAX_RANGES) for name in RETENTION]
    if len({len(part) for part in parts}) > 1:
        sizes = ", ".join(f"{len(part)} '{name}'" for name, part in zip(RETENTION, parts, strict=True))
        raise RequestError(
            f"needs a start, an end and a priority for each range, but there are {sizes}", field="retention"
        )
    return list(zip(*parts, strict=True))


def _guide(tensors: Tensors, row: int) -> dict[str, str | None] | None:
    kind = text("guided_decoding_guide_type", scalar(tensors, "guided_decoding_guide_type", row, b""))
    guide = text("guided_decoding_guide", scalar(tensors, "guided_decoding_guide", row, b""))
    if guide and not kind:
        raise RequestError("needs 'guided_decoding_guide_type' beside it", field="guided_decoding")
    return {"kind": kind, "guide": guide or None} if kind else None
