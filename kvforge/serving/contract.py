"""What each input tensor of the Triton contract does here: one table for the stub, preprocessing and tests.

Names, datatypes and shapes are those of TensorRT-LLM's Triton models. A tensor this engine cannot honour is
refused by name as soon as its value asks for something; a value that asks for nothing (`beam_width` 1,
an empty `draft_input_ids`, `return_context_logits` false) is accepted, because clients send those by default.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvforge.errors import RequestError


@dataclass(frozen=True)
class Unsupported:
    """An input that is refused unless it is empty or every element is one of `neutral`."""

    reason: str
    neutral: tuple[Any, ...] = ()


NO_BEAM_SEARCH = "beam search is not supported"
NO_LORA = "LoRA weights are not supported"
NO_PROMPT_TABLE = "prompt embedding tables are not supported"
NO_GUIDED = "guided decoding is not supported"
NO_LOOKAHEAD = "lookahead decoding is not supported"
NO_DRAFT = "draft tokens are not supported"
NO_DECODER_INPUT = "encoder-decoder models are not supported"
NO_RETENTION = "retention priorities are not supported"
NO_TOP_P_DECAY = "top-p decay is not supported"

# Inputs of `tensorrt_llm` that are read by kvforge.serving.request.
SUPPORTED = frozenset(
    {
        "input_ids", "input_lengths", "request_output_len", "num_return_sequences", "end_id",
        "stop_words_list", "bad_words_list", "temperature", "runtime_top_k", "runtime_top_p",
        "repetition_penalty", "min_tokens", "presence_penalty", "frequency_penalty", "seed",
        "return_log_probs", "return_num_input_tokens", "return_num_output_tokens",
        "exclude_input_in_output", "stop", "streaming",
    }
)  # fmt: skip

# Inputs that change nothing where there is one beam and no padding, whatever their value.
WITHOUT_EFFECT = frozenset({"pad_id", "len_penalty", "early_stopping", "beam_search_diversity_rate"})

UNSUPPORTED: dict[str, Unsupported] = {
    "beam_width": Unsupported(NO_BEAM_SEARCH, (0, 1)),
    "draft_input_ids": Unsupported(NO_DRAFT),
    "draft_logits": Unsupported(NO_DRAFT),
    "draft_acceptance_threshold": Unsupported(NO_DRAFT),
    "decoder_input_ids": Unsupported(NO_DECODER_INPUT),
    "decoder_input_lengths": Unsupported(NO_DECODER_INPUT, (0,)),
    "embedding_bias": Unsupported("logit bias is not supported", (0.0,)),
    "runtime_top_p_min": Unsupported(NO_TOP_P_DECAY, (0.0, float(np.float32(1e-6)))),
    "runtime_top_p_decay": Unsupported(NO_TOP_P_DECAY, (1.0,)),
    "runtime_top_p_reset_ids": Unsupported(NO_TOP_P_DECAY, (-1,)),
    "return_context_logits": Unsupported("context logits are not kept when prefill is skipped", (False,)),
    "return_generation_logits": Unsupported("generation logits are not returned", (False,)),
    "return_perf_metrics": Unsupported("per-request performance metrics are not returned", (False,)),
    "prompt_embedding_table": Unsupported(NO_PROMPT_TABLE),
    "prompt_table_extra_ids": Unsupported(NO_PROMPT_TABLE, (0,)),
    "prompt_vocab_size": Unsupported(NO_PROMPT_TABLE, (0,)),
    "lora_task_id": Unsupported(NO_LORA),
    "lora_weights": Unsupported(NO_LORA),
    "lora_config": Unsupported(NO_LORA),
    "retention_token_range_starts": Unsupported(NO_RETENTION),
    "retention_token_range_ends": Unsupported(NO_RETENTION),
    "retention_token_range_priorities": Unsupported(NO_RETENTION),
    "guided_decoding_guide_type": Unsupported(NO_GUIDED),
    "guided_decoding_guide": Unsupported(NO_GUIDED),
    "lookahead_window_size": Unsupported(NO_LOOKAHEAD),
    "lookahead_ngram_size": Unsupported(NO_LOOKAHEAD),
    "lookahead_verification_set_size": Unsupported(NO_LOOKAHEAD),
    # Inputs of `preprocessing`, under the names the ensemble gives them.
    "decoder_text_input": Unsupported(NO_DECODER_INPUT, (b"",)),
    "embedding_bias_words": Unsupported("logit bias is not supported", (b"",)),
    "embedding_bias_weights": Unsupported("logit bias is not supported", (0.0,)),
    "prompt_table_extra_id": Unsupported(NO_PROMPT_TABLE, (0,)),
}

# The ensemble's name of a `tensorrt_llm` input, where it differs.
ENSEMBLE_NAMES = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "streaming": "stream",
    "request_output_len": "max_tokens",
    "stop_words_list": "stop_words",
    "bad_words_list": "bad_words",
    "input_ids": "text_input",
}


def display_name(name: str) -> str:
    """`name` as an error should call it: with the ensemble's name beside it where that differs."""
    other = ENSEMBLE_NAMES.get(name)
    return f"'{name}' ('{other}' of ensemble)" if other else f"'{name}'"


def refuse_unsupported(name: str, values: np.ndarray) -> None:
    """Raise RequestError, naming the tensor, when `values` asks for something this engine does not do."""
    entry = UNSUPPORTED.get(name)
    if entry is None or values.size == 0:
        return
    if entry.neutral and np.isin(values, entry.neutral).all():
        return
    raise RequestError(f"input tensor {display_name(name)} cannot be used: {entry.reason}")
