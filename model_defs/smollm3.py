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
    bias, rotates = optional_flag(hf, "attention_bias"), _rotates(hf)
    slides = optional_flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None
    kinds = hf.get("layer_types") or [f"{'full' if turns or not slides else 'sliding'}_attention" for turns in rotates]
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        layer_windows=windows_from_layer_types({**hf, "layer_types": kinds}, 0),
        unrotated_layers=tuple(layer for layer, turns in enumerate(rotates) if not turns),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=optional_flag(hf, "mlp_bias"),
    )


def _rotates(hf: Mapping[str, Any]) -> list[int]:
    """1 for each layer that rotates and 0 for the others, of which ``no_rope_layers`` may have more."""
    num_layers, rotates = require_int(hf, "num_hidden_layers"), hf.get("no_rope_layers")
    step = optional_int(hf, "no_rope_layer_interval", INTERVAL)
    if rotates is None:
        rotates = [int(layer % step != 0) for layer in range(1, num_layers + 1)]
    if not isinstance(rotates, list) or len(rotates) < num_layers or not all(each in (0, 1) for each in rotates):
        raise ModelError(
            f"no_rope_layers is {reprlib.repr(rotates)} in config.json; it must have a 0 or 1 for each layer."
        )
    return rotates[:num_layers]


READS = (
    *("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window"),
    *("sliding_window", "layer_types"),
)
GGUF = GgufForm("smollm3", is_paired=True)
FAMILY = Family(MODEL_TYPE, "SmolLM3ForCausalLM", from_hf, reads=READS, gguf=GGUF)
