"""Mixtral: Mistral's attention, and a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.experts import experts_everywhere
from model_defs.family import Family
from model_defs.fields import optional_int, require_int
from model_defs.gguf_form import EXPERTS, GgufForm, expert_fields
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "mixtral"
DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
"""What ``MixtralConfig`` takes where config.json lacks the field."""

NAMES = (
    (r"\.block_sparse_moe\.gate\.", ".mlp.gate."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.w1\.", r".mlp.experts.\1.gate_proj."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.w2\.", r".mlp.experts.\1.down_proj."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.w3\.", r".mlp.experts.\1.up_proj."),
)
"""The family's names of a layer's router and experts."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``MixtralConfig`` dictionary; raises ModelError."""
    num_layers = require_int(hf, "num_hidden_layers")
    experts = experts_everywhere(hf, 8, 2)
    window = optional_int(hf, "sliding_window", 0, minimum=0)
    return config_from_hf(
        {**DEFAULTS, **hf}, model_type=MODEL_TYPE, layer_windows=(window,) * num_layers, experts=experts
    )


READS = ("sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok")
GGUF = GgufForm("llama", expert_fields, EXPERTS, has_experts=True, is_paired=True)
FAMILY = Family(MODEL_TYPE, "MixtralForCausalLM", from_hf, weight_names=NAMES, reads=READS, gguf=GGUF)
