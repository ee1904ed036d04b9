"""Granite 4 without layers of Mamba-2 and without experts: Granite's blocks and multipliers, RoPE in all layers or in
none; gate and up are stored as one tensor."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.family import Family
from model_defs.fields import optional_int, require_int
from model_defs.granite import DEFAULTS, READS, granite_config

MODEL_TYPE = "granitemoehybrid"
ATTENTION = ("attention", "full_attention")
NAMES = (
    (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
)
"""The family's names of a layer's MLP."""

FUSED = (("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),)
IGNORED = {
    "intermediate_size": "of experts, which are refused; shared_intermediate_size is that of a layer's MLP",
}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``GraniteMoeHybridConfig`` dictionary; raises ModelError, also for
    models with layers of Mamba-2 or with experts."""
    hf = {**DEFAULTS, **hf}
    num_layers = require_int(hf, "num_hidden_layers")
    kinds = [hf[name] for name in ("layer_types", "layers_block_type") if hf.get(name) is not None]
    if not kinds or any(not isinstance(each, list) or not _attend(each, num_layers) for each in kinds):
        raise ModelError("layer_types names layers of Mamba-2 (or none at all), and only attention is there.")
    if optional_int(hf, "num_local_experts", 8, 0):
        raise ModelError("num_local_experts is not 0, and Granite 4's experts beside a shared MLP are not there.")
    position = hf.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise ModelError(f"position_embedding_type is {position!r}, and only rope, nope and null are there.")
    return granite_config(
        {**hf, "intermediate_size": optional_int(hf, "shared_intermediate_size", 1024)},
        MODEL_TYPE,
        unrotated_layers=() if position == "rope" else tuple(range(num_layers)),
    )


def _attend(kinds: list[Any], num_layers: int) -> bool:
    return len(kinds) == num_layers and all(kind in ATTENTION for kind in kinds)


FAMILY = Family(
    MODEL_TYPE,
    "GraniteMoeHybridForCausalLM",
    from_hf,
    weight_names=NAMES,
    fused=FUSED,
    reads=(
        *READS, "layer_types", "layers_block_type", "num_local_experts", "shared_intermediate_size",
        "position_embedding_type",
    ),
    ignored=IGNORED,
)  # fmt: skip
