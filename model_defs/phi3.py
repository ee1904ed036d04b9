"""Phi-3, Phi-3.5 and Phi-4-mini: longrope, rotation in part; q, k and v are stored as one tensor, gate and up too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.gguf_form import GgufForm, Keys
from model_defs.hf_config import config_from_hf, windows_from_layer_types

MODEL_TYPE = "phi3"
DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000, "original_max_position_embeddings": 4096}
"""What ``Phi3Config`` takes where config.json lacks the field."""

FUSED = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Phi3Config`` dictionary; raises ModelError. A window that no position
    is outside of is none."""
    hf = {**DEFAULTS, **hf}
    for field in ("rope_scaling", "rope_parameters"):
        scaling = hf.get(field)
        if isinstance(scaling, Mapping):
            kind = scaling.get("rope_type", scaling.get("type"))
            hf[field] = {**scaling, "rope_type": "longrope"} if kind in ("su", "yarn") else scaling
    windows = windows_from_layer_types({**hf, "layer_types": None}, 0)
    config = config_from_hf(hf, model_type=MODEL_TYPE, partial_rotation=True)
    reachable = tuple(window if window < config.max_position else 0 for window in windows)
    return replace(config, layer_windows=reachable)


def from_gguf(keys: Keys) -> dict[str, Any]:
    """Return the fields of a file; a window of 0 is none."""
    return {"sliding_window": keys.get("attention.sliding_window") or None}


GGUF = GgufForm(
    "phi3",
    from_gguf,
    ("attention.sliding_window",),
    {"ffn_up": "mlp.gate_up_proj"},
    keeps_space_after=frozenset({"<unk>", "<s>", "<|endoftext|>"}),
)
FAMILY = Family(MODEL_TYPE, "Phi3ForCausalLM", from_hf, fused=FUSED, reads=("sliding_window",), gguf=GGUF)
