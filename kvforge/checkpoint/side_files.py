"""Every key of a checkpoint's JSON files beside ``config.json``, and every file, that transformers reads: used, checked
or ignored, and why. The keys of ``config.json`` are in ``model_defs.config_keys``."""

import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvforge.common.errors import CheckpointError, CheckpointWarning, RequestError
from kvforge.common.number_checks import check_sampling
from kvforge.common.sampling_fields import DEFAULT_FIELDS

Use = Literal["used", "checked", "ignored"]


@dataclass(frozen=True)
class SideFileRule:
    """What becomes of a key or a file. Values of a checked key other than ``neutral`` and null would change texts; they
    are refused, or noted where they are only defaults of requests."""

    use: Use
    why: str
    neutral: tuple[Any, ...] = ()


def _rows(use: Use, why: str, *names: str) -> dict[str, SideFileRule]:
    return {name: SideFileRule(use, why) for name in names}


def _checked(why: str, **neutral: Any) -> dict[str, SideFileRule]:
    return {name: SideFileRule("checked", why, (value,)) for name, value in neutral.items()}


_SAMPLING = "a default of transformers' generate that is not served; noted where it would change texts"
GENERATION: Mapping[str, SideFileRule] = {
    **_rows("used", "ends a text, besides that of config.json", "eos_token_id"),
    **_rows("used", "the model's default of sampling", *DEFAULT_FIELDS),
    **_rows("ignored", "temperature says whether tokens are drawn, as in vLLM", "do_sample"),
    **_checked(
        _SAMPLING,
        num_beams=1,
        num_beam_groups=1,
        diversity_penalty=0.0,
        penalty_alpha=0.0,
        no_repeat_ngram_size=0,
        encoder_no_repeat_ngram_size=0,
        encoder_repetition_penalty=1.0,
        typical_p=1.0,
        epsilon_cutoff=0.0,
        eta_cutoff=0.0,
        min_length=0,
        min_new_tokens=0,
        guidance_scale=1.0,
    ),
    **{
        name: SideFileRule("checked", _SAMPLING)
        for name in (
            *(
                "bad_words_ids",
                "begin_suppress_tokens",
                "suppress_tokens",
                "forced_bos_token_id",
                "forced_eos_token_id",
            ),
            *("exponential_decay_length_penalty", "sequence_bias", "stop_strings", "watermarking_config", "top_h"),
            *("force_words_ids", "constraints", "dola_layers"),
        )
    },
    **_rows("ignored", "requests say how long a text becomes", "max_length", "max_new_tokens", "max_time"),
    **_rows("ignored", "of beam search, which num_beams asks for", "early_stopping", "length_penalty", "low_memory"),
    **_rows("ignored", "the prompt begins as tokenizer.json and chat template say", "bos_token_id", "token_healing"),
    **_rows("ignored", "of encoder-decoder models", "decoder_start_token_id"),
    **_rows("ignored", "sequences are packed and never padded", "pad_token_id"),
    **_rows(
        "ignored",
        "of drafts, which change no text",
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "is_assistant"),
        *("assistant_lookbehind", "target_lookbehind", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
    ),
    **_rows(
        "ignored",
        "how transformers computes and keeps its cache",
        *("cache_config", "cache_implementation", "max_cache_len", "use_cache", "prefill_chunk_size"),
        *("compile_config", "continuous_batching_config", "disable_compile"),
    ),
    **_rows(
        "ignored",
        "which outputs a call returns",
        *("num_return_sequences", "output_attentions", "output_hidden_states", "output_logits", "output_scores"),
        "return_dict_in_generate",
    ),
    **_rows("ignored", "logits that are not finite end a request", "remove_invalid_values"),
    **_rows("ignored", "log-probabilities are of the model's own distribution", "renormalize_logits"),
    **_rows("ignored", "who wrote the file", "_from_model_config", "transformers_version"),
}
"""Keys of ``generation_config.json``."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_NAMES = {
    **_rows("used", "a name that chat templates may use", *_NAMED, "extra_special_tokens"),
    **_rows("used", "the same, as transformers keeps it inside", "model_specific_special_tokens"),
    **_rows("ignored", "tokens without names; tokenizer.json has them", "additional_special_tokens"),
}
_IN_TOKENIZER = "tokenizer.json says it"
TOKENIZER_CONFIG_KEYS: Mapping[str, SideFileRule] = {
    **_TOKEN_NAMES,
    **_rows("used", "the chat templates", "chat_template"),
    **_rows("used", "says that special_tokens_map.json is not read", "added_tokens_decoder"),
    **_checked("special tokens in a text would be ordinary text", split_special_tokens=False),
    **_rows(
        "ignored",
        _IN_TOKENIZER,
        *("add_bos_token", "add_eos_token", "add_prefix_space", "fix_mistral_regex", "legacy", "merges"),
        *("post_processor", "tokenizer", "tokenizer_object", "unk_id", "vocab", "_spm_precompiled_charsmap"),
    ),
    **_rows("ignored", "tokenizer.json is read, whichever class reads it", "tokenizer_class", "auto_map", "backend"),
    **_rows(
        "ignored",
        "texts are neither cut nor padded",
        *("truncation_side", "truncation_strategy", "tokenizer_truncation", "_json_truncation", "stride"),
        *("padding_side", "pad_to_multiple_of", "pad_token_type_id", "tokenizer_padding", "_json_padding"),
        *("max_len", "max_length", "model_max_length"),
    ),
    **_rows(
        "ignored",
        "texts come from the tokenizer's decoder alone, as in vLLM",
        "clean_up_tokenization_spaces",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    ),
    **_rows("ignored", "answers are read by formats of tool calls", "response_schema", "response_template"),
    **_rows("ignored", "for callers who ask transformers to clean messages", "chat_control_tokens"),
    **_rows("ignored", "of processors of images", "processor_class"),
    **_rows("ignored", "Llama 2's system prompt, which transformers 5 no longer adds", "use_default_system_prompt"),
    **_rows(
        "ignored",
        "how the call that loads the tokenizer was made",
        *("_is_local", "cache_dir", "files_loaded", "gguf_file", "init_inputs", "is_local", "local_files_only"),
        *("model_input_names", "name_or_path", "token", "tokenizer_file", "trust_remote_code", "verbose"),
        *("vocab_file", "merges_file"),
    ),
}
"""Keys of ``tokenizer_config.json``."""

SPECIAL_TOKENS_MAP_KEYS: Mapping[str, SideFileRule] = _TOKEN_NAMES
"""Keys of ``special_tokens_map.json``."""

FILES: Mapping[str, SideFileRule] = {
    **_rows("used", "the model", "config.json", "model.safetensors", "model.safetensors.index.json"),
    **_rows("used", "ends of texts and defaults of sampling", "generation_config.json"),
    **_rows("used", "tokens and chat templates", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    **_rows("used", "chat templates", "chat_template.jinja", "additional_chat_templates", "chat_template.json"),
    **_rows("checked", "an adapter that transformers adds to the weights", "adapter_config.json"),
    **_rows("ignored", "read with adapter_config.json alone", "adapter_model.bin", "adapter_model.safetensors"),
    **_rows(
        "ignored",
        "weights that are read where there is no safetensors file, which is required",
        *("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ),
    **_rows(
        "ignored",
        "a slower form of tokenizer.json, which is required",
        *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    ),
    **_rows(
        "ignored",
        "of parts for images, audio and video",
        *("preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json"),
        "processor_config.json",
    ),
    **_rows("ignored", "for readers", "modelcard.json"),
}
"""Files, and the folder, of a checkpoint."""


def check_side_files(folder: Path, generation: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    """Check what the rows say is checked: of the files in a checkpoint's ``folder``, its generation_config.json and its
    tokenizer_config.json. Defaults of requests are noted with CheckpointWarning.

    Raises:
        CheckpointError: something would change what the model computes or reads, and is not supported; or a default of
            sampling is outside its range, so that the engine could not be served with the model's own.
    """
    for name, row in FILES.items():
        if row.use == "checked" and (folder / name).exists():
            raise CheckpointError(
                f"{folder} has {name}, {row.why}; merge it into the weights, or remove it to serve them without."
            )
    for name, value in _unusual(TOKENIZER_CONFIG_KEYS, tokenizer):
        raise CheckpointError(
            f"{name} is {reprlib.repr(value)} in tokenizer_config.json of {folder}, which is not supported; remove it."
        )
    try:
        for name in DEFAULT_FIELDS:
            if generation.get(name) is not None:
                check_sampling(name, generation[name])
    except RequestError as error:
        raise CheckpointError(f"generation_config.json of {folder} cannot be used: {error}") from None
    found = [f"{name} {reprlib.repr(value)}" for name, value in _unusual(GENERATION, generation)]
    if found:
        warnings.warn(
            f"generation_config.json of {folder} asks for {', '.join(found)}, which is not served.",
            CheckpointWarning,
            stacklevel=2,
        )


def _unusual(rows: Mapping[str, SideFileRule], content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Checked keys that have another value than those that change nothing."""
    values = [(name, content.get(name), row.neutral) for name, row in rows.items() if row.use == "checked"]
    return [(name, value) for name, value, neutral in values if value is not None and value not in (*neutral, [], {})]
