"""SmolLM3: RMSNorm, grouped-query attention, SwiGLU; some layers without rotation; optional sliding window in these."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.family import Family
from model_defs.fields import optional_flag, optional_int, require_int
from model_defs.gguf_form import GgufForm
from model_defs.hf_config import config_from_hf, windows_from_layer_types

MODEL_TYPE = "smollm3"
DEFAULTS = {
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""What ``SmolLM3Config`` takes where config.json lacks the field."""

INTERVAL = 4
"""Every so many layers one does not rotate, unless config.json says otherwise; in files of llama.cpp always."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``SmolLM3Config`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    bias, num_layers, unrotated = optional_flag(hf, "attention_bias"), require_int(hf, "num_hidden_layers"), _still(hf)
    slides = optional_flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None
    kinds = [f"{'sliding' if slides and layer in unrotated else 'full'}_attention" for layer in range(num_layers)]
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        layer_windows=windows_from_layer_types({**hf, "layer_types": hf.get("layer_types") or kinds}, 0),
        unrotated_layers=unrotated,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=optional_flag(hf, "mlp_bias"),
    )


def _still(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers without rotation: ``no_rope_layers`` has a 0 for each, or else it is every so many."""
    num_layers, rotates = require_int(hf, "num_hidden_layers"), hf.get("no_rope_layers")
    if rotates is None:
        return tuple(range(num_layers))[(step := optional_int(hf, "no_rope_layer_interval", INTERVAL)) - 1 :: step]
    if not isinstance(rotates, list) or len(rotates) < num_layers or not all(each in (0, 1) for each in rotates):
        raise ModelError(
            f"no_rope_layers is {reprlib.repr(rotates)} in config.json; it must have 1 for each layer that rotates, "
            "and 0 for the others."
        )
    return tuple(layer for layer in range(num_layers) if not rotates[layer])


READS = (
    *("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window"),
    *("sliding_window", "layer_types"),
)
GGUF = GgufForm("smollm3", is_paired=True)
FAMILY = Family(MODEL_TYPE, "SmolLM3ForCausalLM", from_hf, reads=READS, gguf=GGUF)
