"""OLMo 3: OLMo 2's blocks, three layers with a sliding window to one without; RoPE is scaled in the latter alone."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.gemma3_text import ropes_by_kind, windows_by_pattern
from model_defs.olmo2 import DEFAULTS, TRAITS, olmo_config

MODEL_TYPE = "olmo3"
PATTERN = 4
"""Every so many layers one has no window, unless config.json says otherwise."""

THETA = 5e5
"""What ``Olmo3Config`` takes where config.json lacks the field."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Olmo3Config`` dictionary; raises ModelError. ``rope_theta`` alone is
    of layers without a window, as in transformers."""
    hf = {**DEFAULTS, "sliding_window": 4096, "rope_theta": THETA, **hf, "rope_local_base_freq": THETA}
    ropes = ropes_by_kind(hf)
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    return olmo_config(
        hf,
        MODEL_TYPE,
        layer_windows=windows_by_pattern({**hf, "sliding_window_pattern": PATTERN}),
        rope=full,
        local_rope=local if local != full else None,
    )


READS = ("attention_bias", "layer_types", "sliding_window")
FAMILY = Family(MODEL_TYPE, "Olmo3ForCausalLM", from_hf, TRAITS, reads=READS)
