"""GLM-4.5, 4.6 and 4.7: GLM's partial rotation, halves together, and a mixture of experts behind the first layers."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.experts import FIXED_BY_SIGMOID, READS_BY_SIGMOID, experts_by_sigmoid
from model_defs.family import Family
from model_defs.fields import optional_flag
from model_defs.hf_config import config_from_hf
from model_defs.mtp import BEHIND_LAYERS

MODEL_TYPE = "glm4_moe"
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
"""What ``Glm4MoeConfig`` takes where config.json lacks the field."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Glm4MoeConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        partial_rotation=True,
        qkv_bias=optional_flag(hf, "attention_bias"),
        qk_norm=optional_flag(hf, "use_qk_norm"),
        experts=experts_by_sigmoid(hf, count=128),
    )


READS = ("attention_bias", "use_qk_norm", *READS_BY_SIGMOID)
FAMILY = Family(MODEL_TYPE, "Glm4MoeForCausalLM", from_hf, reads=READS, fixed=FIXED_BY_SIGMOID, mtp=BEHIND_LAYERS)
