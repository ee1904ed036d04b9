"""What each input tensor of the Triton contract does here: one table for the stub, preprocessing and tests.

Names, datatypes and shapes are those of TensorRT-LLM's Triton models. A tensor this engine cannot honour is
refused by name as soon as its value asks for something; a value that asks for nothing (`beam_width` 1,
`return_context_logits` false) is accepted, because clients send those by default.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.common.sampling_fields import SAMPLING_FIELDS


@dataclass(frozen=True)
class Unsupported:
    """An input that is refused unless it is empty, every element is one of `neutral`, or a prompt has `ignored` of them
    at most."""

    reason: str
    neutral: tuple[Any, ...] = ()
    ignored: int = 0


NO_BEAM_SEARCH = "beam search is not supported"
NO_LORA = "LoRA weights are not supported"
NO_PROMPT_TABLE = "prompt embedding tables are not supported"
NO_LOOKAHEAD = "lookahead decoding is not supported"
NO_DRAFT_LOGITS = "drafts are verified by their token ids alone ('draft_input_ids')"
NO_DRAFT_CHOICE = (
    "how to draft is the server's choice (kvforge serve --speculative-method); send drafts of your own as "
    "'draft_input_ids' to tensorrt_llm"
)
NO_DECODER_INPUT = "encoder-decoder models are not supported"
NO_IMAGES = "models of images and videos are not supported"
NO_DURATIONS = "pages keep their priority until they are needed, or have none ('retention_token_range_priorities')"

# Inputs of `tensorrt_llm` that are read by kvforge.serving.contract.request.
SUPPORTED = frozenset(
    {
        "input_ids", "input_lengths", "request_output_len", "num_return_sequences", "end_id",
        "stop_words_list", "bad_words_list", "embedding_bias", "seed", "draft_input_ids",
        "return_log_probs", "return_generation_logits", "return_perf_metrics",
        "return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output", "stop", "streaming",
        "retention_token_range_starts", "retention_token_range_ends", "retention_token_range_priorities",
        "guided_decoding_guide_type", "guided_decoding_guide", "stop_strings", "num_top_log_probs",
        "num_prompt_log_probs", *(field.tensor or name for name, field in SAMPLING_FIELDS.items()),
    }
)  # fmt: skip

_ONE_BEAM = "it changes how beams are compared, and there is one"
WITHOUT_EFFECT = {
    "pad_id": "it fills prompts to one length, and prompts are packed without padding",
    "len_penalty": _ONE_BEAM,
    "early_stopping": _ONE_BEAM,
    "beam_search_diversity_rate": _ONE_BEAM,
}
"""Inputs that may have any value, and why none has an effect."""

UNSUPPORTED: dict[str, Unsupported] = {
    "beam_width": Unsupported(NO_BEAM_SEARCH, (0, 1)),
    "draft_logits": Unsupported(NO_DRAFT_LOGITS),
    "draft_acceptance_threshold": Unsupported(NO_DRAFT_LOGITS),
    # One pad id is what TensorRT-LLM's preprocessing sends with every prompt.
    "decoder_input_ids": Unsupported(NO_DECODER_INPUT, ignored=1),
    "decoder_input_lengths": Unsupported(NO_DECODER_INPUT, (0, 1)),
    "return_context_logits": Unsupported("logits are computed for generated tokens only", (False,)),
    "prompt_embedding_table": Unsupported(NO_PROMPT_TABLE),
    "prompt_table_extra_ids": Unsupported(NO_PROMPT_TABLE, (0,)),
    "prompt_vocab_size": Unsupported(NO_PROMPT_TABLE, (0,)),
    "lora_task_id": Unsupported(NO_LORA),
    "lora_weights": Unsupported(NO_LORA),
    "lora_config": Unsupported(NO_LORA),
    "lookahead_window_size": Unsupported(NO_LOOKAHEAD),
    "lookahead_ngram_size": Unsupported(NO_LOOKAHEAD),
    "lookahead_verification_set_size": Unsupported(NO_LOOKAHEAD),
    "retention_token_range_durations_ms": Unsupported(NO_DURATIONS),
    "retention_decode_priority": Unsupported(NO_DURATIONS),
    "retention_decode_duration_ms": Unsupported(NO_DURATIONS),
    "encoder_input_features": Unsupported(NO_DECODER_INPUT),
    "encoder_output_lengths": Unsupported(NO_DECODER_INPUT, (0,)),
    "cross_attention_mask": Unsupported(NO_DECODER_INPUT),
    "skip_cross_attn_blocks": Unsupported(NO_DECODER_INPUT, (False,)),
    "mrope_rotary_cos_sin": Unsupported(NO_IMAGES),
    "mrope_position_deltas": Unsupported(NO_IMAGES),
    "context_phase_params": Unsupported("prefill and decoding in different servers is not supported"),
    # Inputs of `preprocessing` and `tensorrt_llm_bls`, under the names that clients know.
    "decoder_text_input": Unsupported(NO_DECODER_INPUT, (b"",)),
    "prompt_table_extra_id": Unsupported(NO_PROMPT_TABLE, (0,)),
    "image_input": Unsupported(NO_IMAGES),
    "image_bytes_input": Unsupported(NO_IMAGES),
    "image_url_input": Unsupported(NO_IMAGES, (b"",)),
    "video_bytes_input": Unsupported(NO_IMAGES),
    "num_draft_tokens": Unsupported(NO_DRAFT_CHOICE, (0,)),
    "use_draft_logits": Unsupported(NO_DRAFT_CHOICE, (False,)),
}

ALIASES = {"random_seed": "seed", "min_length": "min_tokens"}
"""Names of earlier releases of TensorRT-LLM, and today's."""

# The ensemble's name of a `tensorrt_llm` input, where it differs.
ENSEMBLE_NAMES = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "streaming": "stream",
    "request_output_len": "max_tokens",
    "stop_words_list": "stop_words",
    "bad_words_list": "bad_words",
    "prompt_table_extra_ids": "prompt_table_extra_id",
    "decoder_input_ids": "decoder_text_input",
    "embedding_bias": "embedding_bias_words",
    "input_ids": "text_input",
}


TENSORS = {
    **{name: field.tensor for name, field in SAMPLING_FIELDS.items() if field.tensor},
    "max_tokens": "request_output_len",
    "n": "num_return_sequences",
    "stop": "stop_strings",
    "stop_token_ids": "end_id",
    "stop_words_ids": "stop_words_list",
    "bad_words_ids": "bad_words_list",
    "logit_bias": "embedding_bias",
    "draft_token_ids": "draft_input_ids",
    "guided_decoding": "guided_decoding_guide",
    "retention": "retention_token_range_starts",
    "return_logits": "return_generation_logits",
    "logprobs": "num_top_log_probs",
    "prompt_logprobs": "num_prompt_log_probs",
}
"""The input of `tensorrt_llm` that each field of SamplingParams comes in, where their names differ."""
FIELDS = {name: field for field, name in TENSORS.items()}


def display_name(name: str) -> str:
    """The input `name` as an error should call it: with the ensemble's name beside it where that differs."""
    other = ENSEMBLE_NAMES.get(name)
    return f"'{name}' ('{other}' of ensemble)" if other else f"'{name}'"


def refuse(name: str, reason: str, remedy: str = "", operator: str = "") -> RequestError:
    """The refusal of an input, under the name that SamplingParams has for it where it has one."""
    return RequestError(reason, remedy, field=FIELDS.get(name, name), operator=operator)


def with_todays_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with today's names for the ALIASES. Raises RequestError where one comes under both."""
    for alias, name in ALIASES.items():
        if alias in tensors:
            if name in tensors:
                raise RequestError(f"input tensors '{alias}' and '{name}' are the same", f"send '{name}' alone")
            tensors = {**tensors, name: tensors[alias]}
            del tensors[alias]
    return tensors


def refuse_unsupported(name: str, values: np.ndarray) -> None:
    """Raise RequestError, naming the tensor, when `values` asks for something this engine does not do."""
    entry = UNSUPPORTED.get(name)
    if entry is None or values.size == 0:
        return
    if (entry.neutral and np.isin(values, entry.neutral).all()) or values[0].size <= entry.ignored:
        return
    raise refuse(name, f"cannot be used: {entry.reason}")


# What clients of `ensemble` and `tensorrt_llm_bls` may send, for a hint about a misspelt name.
TEXT_INPUTS = tuple(
    sorted({ENSEMBLE_NAMES.get(name, name) for name in {*SUPPORTED, *WITHOUT_EFFECT, *UNSUPPORTED, *ALIASES}})
)
