"""Qwen3-Next: three layers with linear attention to one with K and V, whose result has a gate; experts in most layers,
with a shared one that a gate weighs."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.experts import STACKED, Experts, count_experts
from model_defs.family import Family
from model_defs.fields import optional_flag, optional_int, require_int
from model_defs.hf_config import config_from_hf
from model_defs.linear import READS as LINEAR_READS
from model_defs.linear import linear_from_hf
from model_defs.mtp import BY_ITSELF
from model_defs.qwen3_moe import sparse_layers

MODEL_TYPE = "qwen3_next"
TRAITS = {"qk_norm": True, "attention_gate": True}
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 5632,
    "max_position_embeddings": 32768,
}
"""What ``Qwen3NextConfig`` takes where config.json lacks the field."""

NAMES = ((r"\.shared_expert\.", ".shared_experts."),)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Qwen3NextConfig`` dictionary; raises ModelError."""
    layers = sparse_layers(hf, require_int(hf, "num_hidden_layers"))
    experts = experts_with_shared(hf, layers, 512, 10, optional_flag(hf, "norm_topk_prob", True)) if layers else None
    return hybrid_config({**DEFAULTS, **hf}, MODEL_TYPE, by_key_head=True, experts=experts)


def hybrid_config(
    hf: Mapping[str, Any], model_type: str, by_key_head: bool = False, experts: Experts | None = None
) -> ModelConfig:
    """Return the ModelConfig of a family with these layers; raises ModelError."""
    bias, linear = optional_flag(hf, "attention_bias"), linear_from_hf(hf, by_key_head)
    variant: dict[str, Any] = {**TRAITS, "norm_offset": 1.0, "linear": linear, "experts": experts}
    return config_from_hf(hf, model_type=model_type, partial_rotation=True, qkv_bias=bias, output_bias=bias, **variant)


def experts_with_shared(
    hf: Mapping[str, Any], layers: tuple[int, ...], count: int, num_active: int, normalize: bool
) -> Experts:
    """Return the mixture of ``layers``, by default ``num_active`` of ``count`` experts; raises ModelError."""
    return Experts(
        num_experts=count_experts(hf, count),
        num_active=optional_int(hf, "num_experts_per_tok", num_active),
        intermediate_size=optional_int(hf, "moe_intermediate_size", 512),
        normalize=normalize,
        layers=layers,
        num_shared=1,
        shared_intermediate_size=optional_int(hf, "shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


OF_EXPERTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
READS = (*LINEAR_READS, *OF_EXPERTS, "attention_bias", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
FAMILY = Family(
    MODEL_TYPE,
    "Qwen3NextForCausalLM",
    from_hf,
    TRAITS,
    weight_names=NAMES,
    stacked=STACKED,
    stacked_by_outputs=True,
    reads=READS,
    mtp=BY_ITSELF,
)
