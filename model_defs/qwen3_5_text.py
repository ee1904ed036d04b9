"""Qwen3.5's dense text models: Qwen3-Next's layers with plain MLPs, and the projections of linear attention one by
one."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.linear import READS as LINEAR_READS
from model_defs.mtp import BY_ITSELF
from model_defs.qwen3_next import TRAITS, hybrid_config

MODEL_TYPE = "qwen3_5_text"
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
}
"""What ``Qwen3_5TextConfig`` takes where config.json lacks the field."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Qwen3_5TextConfig`` dictionary; raises ModelError."""
    return hybrid_config({**DEFAULTS, **hf}, MODEL_TYPE)


FAMILY = Family(
    MODEL_TYPE,
    "Qwen3_5ForCausalLM",
    from_hf,
    TRAITS,
    text_part_of=("qwen3_5",),
    reads=(*LINEAR_READS, "attention_bias"),
    mtp=BY_ITSELF,
)
