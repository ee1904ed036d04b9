"""EXAONE 4: norms of what attention and MLP add and none before them; where layers have sliding windows, those without
one do not rotate."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.fields import optional_int, require_int
from model_defs.gemma3_text import KINDS
from model_defs.hf_config import config_from_hf, windows_from_layer_types
from model_defs.olmo2 import NORMS

MODEL_TYPE = "exaone4"
TRAITS = {"qk_norm": True, "branch_norms": True, "pre_norms": False}
DEFAULTS = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sliding_window": 4096,
}
"""What ``Exaone4Config`` takes where config.json lacks the field; a null ``sliding_window`` is none."""

PATTERN = 4
"""Every so many layers one has no window, unless config.json says otherwise; LLLG is a word for it."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Exaone4Config`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    slides = hf["sliding_window"] is not None
    if hf.get("sliding_window_pattern") == "LLLG":
        hf["sliding_window_pattern"] = PATTERN
    step = optional_int(hf, "sliding_window_pattern", PATTERN, minimum=int(slides))
    layers = range(1, require_int(hf, "num_hidden_layers") + 1)
    kinds = hf.get("layer_types") or [KINDS[slides and layer % step != 0] for layer in layers]
    windows = windows_from_layer_types({**hf, "layer_types": kinds}, 0)
    still = (layer for layer, kind in enumerate(kinds) if slides and kind != KINDS[1])
    return config_from_hf(
        hf, model_type=MODEL_TYPE, layer_windows=windows, unrotated_layers=tuple(still), layer_norms=NORMS, **TRAITS
    )


READS = ("layer_types", "sliding_window", "sliding_window_pattern")
FAMILY = Family(MODEL_TYPE, "Exaone4ForCausalLM", from_hf, TRAITS, reads=READS)
