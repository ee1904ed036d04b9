"""Qwen2 and Qwen2.5: Llama's blocks with q, k and v biases; optional sliding window in the later layers."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.fields import optional_flag, optional_int
from model_defs.gguf_form import GgufForm
from model_defs.hf_config import config_from_hf, windows_from_layer_types

MODEL_TYPE = "qwen2"
TRAITS = {"qkv_bias": True}
DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
"""What ``Qwen2Config`` and ``Qwen3Config`` take where config.json lacks the field."""


def qwen_windows(hf: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return each layer's window; None (no window anywhere) unless ``use_sliding_window`` is set."""
    if not optional_flag(hf, "use_sliding_window"):
        return None
    return windows_from_layer_types(hf, optional_int(hf, "max_window_layers", 0, minimum=0))


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Qwen2Config`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    return config_from_hf(hf, model_type=MODEL_TYPE, layer_windows=qwen_windows(hf), **TRAITS)


READS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
FAMILY = Family(MODEL_TYPE, "Qwen2ForCausalLM", from_hf, TRAITS, reads=READS, gguf=GgufForm("qwen2"))
