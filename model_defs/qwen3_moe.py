"""Qwen3 MoE: Qwen3's attention, and a mixture of experts in most layers."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.experts import Experts, count_experts
from model_defs.family import Family
from model_defs.fields import optional_flag, optional_int, require_int
from model_defs.gguf_form import EXPERTS, GgufForm, Keys, expert_fields
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "qwen3_moe"
TRAITS = {"qk_norm": True}
DEFAULTS = {"num_key_value_heads": 4}
"""What ``Qwen3MoeConfig`` takes where config.json lacks the field."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Qwen3MoeConfig`` dictionary; raises ModelError."""
    attention_bias, num_layers = optional_flag(hf, "attention_bias"), require_int(hf, "num_hidden_layers")
    slides = optional_flag(hf, "use_sliding_window")
    window = optional_int(hf, "sliding_window", 4096, minimum=0) if slides else 0
    return config_from_hf(
        {**DEFAULTS, **hf},
        model_type=MODEL_TYPE,
        layer_windows=(window,) * num_layers,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        experts=Experts(
            num_experts=count_experts(hf, 128),
            num_active=optional_int(hf, "num_experts_per_tok", 8),
            intermediate_size=optional_int(hf, "moe_intermediate_size", 768),
            normalize=optional_flag(hf, "norm_topk_prob"),
            layers=sparse_layers(hf, num_layers),
        ),
        **TRAITS,
    )


def sparse_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Every ``decoder_sparse_step``-th layer, without ``mlp_only_layers``."""
    step, dense = optional_int(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"mlp_only_layers is {reprlib.repr(dense)} in config.json; it must be a list of layers.")
    return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


READS = (
    *("attention_bias", "sliding_window", "use_sliding_window", "decoder_sparse_step", "mlp_only_layers"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
)


def from_gguf(keys: Keys) -> dict[str, Any]:
    """Return the fields of a file: every layer has experts, whose weights add up to 1 as in all published models."""
    size = keys.get("expert_feed_forward_length")
    return {**expert_fields(keys), "moe_intermediate_size": size, "norm_topk_prob": True}


GGUF = GgufForm("qwen3moe", from_gguf, (*EXPERTS, "expert_feed_forward_length"), has_experts=True)
FAMILY = Family(MODEL_TYPE, "Qwen3MoeForCausalLM", from_hf, TRAITS, reads=READS, gguf=GGUF)
