"""Bamba: Mamba-2 in most layers, in the others attention whose heads rotate by half."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.family import Family
from model_defs.fields import optional_flag, require_int
from model_defs.hf_config import config_from_hf
from model_defs.mamba2 import ATTENTION, FIXED, KINDS, MAMBA, SIZES, mamba2_from_hf

MODEL_TYPE = "bamba"
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What ``BambaConfig`` takes where config.json lacks the field."""

NAMES = (
    (r"\.mamba\.", ".linear_attn."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"^model\.final_layernorm\.", "model.norm."),
)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``BambaConfig`` dictionary; raises ModelError."""
    hf, full = {**DEFAULTS, **hf}, hf.get("attn_layer_indices") or []
    if not isinstance(full, list) or not all(type(each) is int for each in full):
        raise ModelError(f"attn_layer_indices is {reprlib.repr(full)} in config.json; it must be a list of layers.")
    layers = range(require_int(hf, "num_hidden_layers"))
    kinds = [ATTENTION[0] if layer in full else MAMBA[0] for layer in layers]
    bias = optional_flag(hf, "attention_bias")
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        partial_rotation=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=optional_flag(hf, "mlp_bias"),
        linear=mamba2_from_hf({**hf, "layer_types": kinds, "layers_block_type": None}),
    )


FAMILY = Family(
    MODEL_TYPE,
    "BambaForCausalLM",
    from_hf,
    weight_names=NAMES,
    reads=(*SIZES, "attn_layer_indices", "attention_bias", "mlp_bias"),
    fixed={**FIXED, **dict.fromkeys(KINDS, ())},
)
