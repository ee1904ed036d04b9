"""Model definitions: one file per Hugging Face ``model_type``, shared layers, the KV layout, the graphs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from model_defs import llama, mistral, qwen2, qwen3
from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.hf_config import token_ids
from model_defs.rope import RopeConfig

__all__ = ["MODEL_TYPES", "ModelConfig", "ModelError", "RopeConfig", "load_config"]

MODEL_TYPES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    family.MODEL_TYPE: family.from_hf for family in (llama, mistral, qwen2, qwen3)
}


def load_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the ModelConfig for the contents of a ``config.json``; SwiftKV variants (``llama_swiftkv`` …)
    are read by their base family. The ``eos_token_id`` of a ``generation_config.json`` end a text as well:
    chat models name their end-of-turn token there.

    Raises:
        ModelError: unknown ``model_type`` or a bad field.
    """
    model_type = hf.get("model_type")
    base = str(model_type).removesuffix("_swiftkv")
    if base not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported are {known}, "
            "each plain or with the suffix _swiftkv."
        )
    if not isinstance(hf.get("num_hidden_layers"), int):
        raise ModelError(f"config.json needs an integer num_hidden_layers, found {hf.get('num_hidden_layers')!r}.")
    if str(model_type).endswith("_swiftkv") and "num_key_value_layers" not in hf:
        raise ModelError(
            f"A {model_type} config.json needs num_key_value_layers, the first layer whose KV comes "
            "from the single input."
        )
    config = MODEL_TYPES[base](hf)
    more = token_ids({**hf, **(generation or {}), "vocab_size": config.vocab_size}, "eos_token_id")
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))
