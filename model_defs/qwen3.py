"""Qwen3: RMSNorm over the head dimension of q and k before rotation; no biases by default."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.fields import optional_flag
from model_defs.gguf_form import GgufForm
from model_defs.hf_config import config_from_hf
from model_defs.qwen2 import DEFAULTS, READS, qwen_windows

MODEL_TYPE = "qwen3"
TRAITS = {"qk_norm": True}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Qwen3Config`` dictionary; raises ModelError."""
    attention_bias = optional_flag(hf, "attention_bias")
    hf = {**DEFAULTS, "head_dim": 128, **hf}  # Qwen3's own default, not hidden_size / num_attention_heads
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        layer_windows=qwen_windows(hf),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        **TRAITS,
    )


FAMILY = Family(
    MODEL_TYPE, "Qwen3ForCausalLM", from_hf, TRAITS, reads=(*READS, "attention_bias"), gguf=GgufForm("qwen3")
)
