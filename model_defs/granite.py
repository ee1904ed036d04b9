"""Granite 3: Llama's blocks with multipliers of embeddings, scores, what layers add, and logits."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.family import Family
from model_defs.fields import number, optional_flag
from model_defs.gguf_form import GgufForm, Keys
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "granite"
DEFAULTS = {
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What ``GraniteConfig`` and ``GraniteMoeConfig`` take where config.json lacks the field."""

MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}
"""Fields of config.json, 1 by default, and those of ModelConfig."""

READS = ("attention_bias", *MULTIPLIERS)


def granite_config(hf: Mapping[str, Any], model_type: str, **variant: Any) -> ModelConfig:
    """Return the ModelConfig of a config.json; ``variant`` as ``config_from_hf`` takes it. Raises ModelError."""
    factors = {ours: number(hf.get(name, 1.0), name, 1e-6, 1e6) for name, ours in MULTIPLIERS.items()}
    bias = optional_flag(hf, "attention_bias")
    fields = {"qkv_bias": bias, "output_bias": bias, **factors, **variant}
    return config_from_hf({**DEFAULTS, **hf}, model_type=model_type, **fields)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``GraniteConfig`` dictionary; raises ModelError."""
    return granite_config(hf, MODEL_TYPE, mlp_bias=optional_flag(hf, "mlp_bias"))


GGUF_KEYS = dict(zip(("embedding_scale", "attention.scale", "residual_scale", "logit_scale"), MULTIPLIERS, strict=True))


def from_gguf(keys: Keys) -> dict[str, Any]:
    """Return the fields of a file."""
    return {name: keys[key] for key, name in GGUF_KEYS.items() if key in keys}


GGUF = GgufForm("granite", from_gguf, tuple(GGUF_KEYS), is_paired=True)
FAMILY = Family(MODEL_TYPE, "GraniteForCausalLM", from_hf, reads=(*READS, "mlp_bias"), gguf=GGUF)
