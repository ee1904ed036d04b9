"""Ministral 3, 3B to 14B: Mistral's blocks with YaRN, and queries that grow with their positions."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.family import Family
from model_defs.fields import number, optional_int, require_int
from model_defs.hf_config import config_from_hf
from model_defs.rope_config import QueryGrowth
from model_defs.rope_reading import rope_from_hf

MODEL_TYPE = "ministral3"
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What ``Ministral3Config`` takes where config.json lacks the fields."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Ministral3Config`` dictionary; raises ModelError."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or ROPE
    if given is ROPE and hf.get("rope_theta", ROPE["rope_theta"]) != ROPE["rope_theta"]:
        raise ModelError(
            f"rope_theta is {hf['rope_theta']!r}, but without rope_parameters Ministral 3 takes all of them as "
            "published; put it into rope_parameters."
        )
    hf = {**DEFAULTS, **hf, "rope_scaling": given}
    rope, window = rope_from_hf(hf), optional_int(hf, "sliding_window", 0, minimum=0)
    beta = given.get("llama_4_scaling_beta")
    if beta is not None:
        beta = number(beta, "llama_4_scaling_beta", 0.0, 1e6)
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        rope=rope,
        layer_windows=(window,) * require_int(hf, "num_hidden_layers"),
        query_growth=QueryGrowth(beta, rope.original_max_position) if beta else None,
    )


FAMILY = Family(
    MODEL_TYPE,
    "Ministral3ForCausalLM",
    from_hf,
    text_part_of=("mistral3",),
    reads=("sliding_window",),
    fixed={"layer_types": ()},
)
