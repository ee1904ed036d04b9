"""Granite 4: Granite's blocks and multipliers, Mamba-2 in most layers or in none, RoPE in all layers with attention or
in none, and an MLP in every layer, which experts may stand beside; gate and up are stored as one tensor."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.experts import Experts
from model_defs.family import Family
from model_defs.fields import optional_int, require_int
from model_defs.granite import DEFAULTS, READS, granite_config
from model_defs.granitemoe import NAMES as OF_EXPERTS
from model_defs.granitemoe import STACKED
from model_defs.mamba2 import FIXED, KINDS, SIZES, mamba2_from_hf

MODEL_TYPE = "granitemoehybrid"
NAMES = (
    *OF_EXPERTS,
    (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
    (r"\.mamba\.", ".linear_attn."),
)
"""The family's names of a layer's MLP, experts and Mamba-2."""

FUSED = (("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``GraniteMoeHybridConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    layers, experts = tuple(range(require_int(hf, "num_hidden_layers"))), None
    shared = optional_int(hf, "shared_intermediate_size", 1024)
    if count := optional_int(hf, "num_local_experts", 8, 0):
        experts = Experts(
            num_experts=count,
            num_active=optional_int(hf, "num_experts_per_tok", 2),
            intermediate_size=require_int(hf, "intermediate_size"),
            normalize=True,
            layers=layers,
            num_shared=1,
            shared_intermediate_size=shared,
            shared_is_mlp=True,
        )
    position = hf.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        found = reprlib.repr(position)
        raise ModelError(f"position_embedding_type is {found} in config.json; it must be rope, nope or null.")
    return granite_config(
        {**hf, "intermediate_size": shared},
        MODEL_TYPE,
        unrotated_layers=() if position == "rope" else layers,
        experts=experts,
        linear=mamba2_from_hf(hf),
    )


FAMILY = Family(
    MODEL_TYPE,
    "GraniteMoeHybridForCausalLM",
    from_hf,
    weight_names=NAMES,
    fused=FUSED,
    stacked=STACKED,
    stacked_by_outputs=True,
    reads=(
        *READS,
        *KINDS,
        *SIZES,
        *("num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "position_embedding_type"),
    ),
    fixed=FIXED,
)
