"""Granite 3 MoE and PowerMoE: Granite's blocks and multipliers, and a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.experts import Experts, count_experts
from model_defs.family import Family
from model_defs.fields import optional_int, require_int
from model_defs.granite import DEFAULTS, READS, granite_config

MODEL_TYPE = "granitemoe"
NAMES = (
    (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
    (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
)
"""The family's names of a layer's router and experts."""

STACKED = (("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")), ("mlp.experts.down_proj", ("down_proj",)))


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``GraniteMoeConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    experts = Experts(
        num_experts=count_experts(hf, 8),
        num_active=optional_int(hf, "num_experts_per_tok", 2),
        intermediate_size=require_int(hf, "intermediate_size"),
        normalize=True,
        layers=tuple(range(require_int(hf, "num_hidden_layers"))),
    )
    return granite_config(hf, MODEL_TYPE, experts=experts)


FAMILY = Family(
    MODEL_TYPE,
    "GraniteMoeForCausalLM",
    from_hf,
    weight_names=NAMES,
    stacked=STACKED,
    stacked_by_outputs=True,
    reads=(*READS, "num_experts", "num_local_experts", "num_experts_per_tok"),
)
