"""Qwen3.5's text models with experts: the dense ones' attention, and Qwen3-Next's mixture in every layer."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.fields import require_int
from model_defs.linear import READS as LINEAR_READS
from model_defs.mtp import BY_ITSELF
from model_defs.qwen3_5_text import DEFAULTS as DENSE
from model_defs.qwen3_next import NAMES, OF_EXPERTS, STACKED, TRAITS, experts_with_shared, hybrid_config

MODEL_TYPE = "qwen3_5_moe_text"
DEFAULTS = {**DENSE, "num_key_value_heads": 2, "intermediate_size": 512}
"""What ``Qwen3_5MoeTextConfig`` takes where config.json lacks the field; no layer has an MLP by itself."""

IGNORED = {"intermediate_size": "every layer has experts, of moe_intermediate_size"}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Qwen3_5MoeTextConfig`` dictionary; raises ModelError."""
    layers = tuple(range(require_int(hf, "num_hidden_layers")))
    hf = {**hf, "intermediate_size": DEFAULTS["intermediate_size"]}
    experts = experts_with_shared(hf, layers, 256, 8, True)
    return hybrid_config({**DEFAULTS, **hf}, MODEL_TYPE, experts=experts)


FAMILY = Family(
    MODEL_TYPE,
    "Qwen3_5MoeForCausalLM",
    from_hf,
    TRAITS,
    weight_names=NAMES,
    text_part_of=("qwen3_5_moe",),
    stacked=STACKED,
    stacked_by_outputs=True,
    reads=(*LINEAR_READS, *OF_EXPERTS, "attention_bias"),
    ignored=IGNORED,
    mtp=BY_ITSELF,
)
