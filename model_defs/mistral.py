"""Mistral: Llama's blocks, with every layer on a sliding window where one is configured."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.hf_config import config_from_hf, windows_from_layer_types

MODEL_TYPE = "mistral"
DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096}
"""What ``MistralConfig`` takes where config.json lacks the field; a null ``sliding_window`` is none."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``MistralConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    return config_from_hf(hf, model_type=MODEL_TYPE, layer_windows=windows_from_layer_types(hf, 0))


FAMILY = Family(
    MODEL_TYPE, "MistralForCausalLM", from_hf, text_part_of=("mistral3",), reads=("sliding_window", "layer_types")
)
