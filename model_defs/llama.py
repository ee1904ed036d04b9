"""Llama 2 and 3.x: RMSNorm, RoPE (with Llama 3.1's scaling), grouped-query attention, SwiGLU."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "llama"


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``LlamaConfig`` dictionary; raises ModelError."""
    attention_bias = bool(hf.get("attention_bias", False))
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )
