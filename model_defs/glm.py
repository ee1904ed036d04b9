"""GLM-4 as glm-4-9b-chat-hf has it: half of each head rotates, neighbours together; biases of q, k and v."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.fields import optional_flag
from model_defs.gguf_form import GgufForm
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "glm"
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
"""What ``GlmConfig`` and ``Glm4Config`` take where config.json lacks the field."""

FUSED = (("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),)


def glm_config(hf: Mapping[str, Any], model_type: str, branch_norms: bool = False) -> ModelConfig:
    """Return the ModelConfig of a ``GlmConfig`` or ``Glm4Config`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    bias = optional_flag(hf, "attention_bias", True)
    return config_from_hf(
        hf,
        model_type=model_type,
        partial_rotation=True,
        interleaved=True,
        qkv_bias=bias,
        branch_norms=branch_norms,
    )


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``GlmConfig`` dictionary; raises ModelError."""
    return glm_config(hf, MODEL_TYPE)


GGUF = GgufForm("chatglm", names={"ffn_up": "mlp.gate_up_proj"})
FAMILY = Family(MODEL_TYPE, "GlmForCausalLM", from_hf, fused=FUSED, reads=("attention_bias",), gguf=GGUF)
