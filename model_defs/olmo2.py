"""OLMo 2: norms of what attention and MLP add and none before them; those of q and k are over all heads together."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.fields import optional_flag
from model_defs.gguf_form import GgufForm
from model_defs.hf_config import config_from_hf
from model_defs.model_shape import LayerNorms

MODEL_TYPE = "olmo2"
TRAITS = {"qk_norm": True, "qk_norm_whole": True, "branch_norms": True, "pre_norms": False}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}
"""What ``Olmo2Config`` and ``Olmo3Config`` take where config.json lacks the field."""

NORMS = LayerNorms("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
"""The first of these there is not."""


def olmo_config(hf: Mapping[str, Any], model_type: str, **variant: Any) -> ModelConfig:
    """Return the ModelConfig of a config.json with DEFAULTS; ``variant`` as ``config_from_hf`` takes it."""
    bias = optional_flag(hf, "attention_bias")
    fields = {"qkv_bias": bias, "output_bias": bias, "layer_norms": NORMS, **TRAITS, **variant}
    return config_from_hf(hf, model_type=model_type, **fields)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Olmo2Config`` dictionary; raises ModelError."""
    return olmo_config({**DEFAULTS, **hf}, MODEL_TYPE)


GGUF = GgufForm("olmo2")
FAMILY = Family(MODEL_TYPE, "Olmo2ForCausalLM", from_hf, TRAITS, reads=("attention_bias",), gguf=GGUF)
