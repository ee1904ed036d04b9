"""Llama 2 and 3.x: RMSNorm, RoPE (with Llama 3.1's scaling), grouped-query attention, SwiGLU."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.fields import optional_flag
from model_defs.gguf_form import GgufForm
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "llama"
DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2}
"""What ``LlamaConfig`` takes where config.json lacks the field."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``LlamaConfig`` dictionary; raises ModelError."""
    attention_bias = optional_flag(hf, "attention_bias")
    return config_from_hf(
        {**DEFAULTS, **hf},
        model_type=MODEL_TYPE,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=optional_flag(hf, "mlp_bias"),
    )


GGUF = GgufForm("llama", is_paired=True)
FAMILY = Family(MODEL_TYPE, "LlamaForCausalLM", from_hf, reads=("attention_bias", "mlp_bias"), gguf=GGUF)
