"""Granite 3 MoE and PowerMoE: Granite's blocks and multipliers, and a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.experts import STACKED, experts_everywhere
from model_defs.family import Family
from model_defs.granite import DEFAULTS, READS, granite_config

MODEL_TYPE = "granitemoe"
NAMES = (
    (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
    (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),  # as ModelOpt writes them
)
"""The family's names of a layer's router and experts."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``GraniteMoeConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    return granite_config(hf, MODEL_TYPE, experts=experts_everywhere(hf, 8, 2))


FAMILY = Family(
    MODEL_TYPE,
    "GraniteMoeForCausalLM",
    from_hf,
    weight_names=NAMES,
    stacked=STACKED,
    stacked_by_outputs=True,
    reads=(*READS, "num_experts", "num_local_experts", "num_experts_per_tok"),
)
