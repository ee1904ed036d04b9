"""GLM-4-0414: the blocks of glm-4-9b, and norms of what attention and MLP add to the residual stream."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.gguf_form import GgufForm
from model_defs.glm import FUSED, glm_config

MODEL_TYPE = "glm4"
TRAITS = {"branch_norms": True}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Glm4Config`` dictionary; raises ModelError."""
    return glm_config(hf, MODEL_TYPE, **TRAITS)


GGUF = GgufForm("glm4", names={"ffn_up": "mlp.gate_up_proj"})
FAMILY = Family(MODEL_TYPE, "Glm4ForCausalLM", from_hf, TRAITS, fused=FUSED, reads=("attention_bias",), gguf=GGUF)
