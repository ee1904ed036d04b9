"""gpt-oss: a sink in each head, every other layer with a sliding window, and a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.experts import STACKED, ClampedGate, experts_everywhere
from model_defs.family import Family
from model_defs.fields import number, optional_flag, require_int
from model_defs.gguf_form import EXPERTS, GgufForm, Keys, expert_fields
from model_defs.hf_config import config_from_hf, windows_from_layer_types

MODEL_TYPE = "gpt_oss"
TRAITS = {"attention_sinks": True}
DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
}
"""What ``GptOssConfig`` takes where config.json lacks the field."""

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
KINDS = ("sliding_attention", "full_attention")

NAMES = ((r"\.mlp\.router\.", ".mlp.gate."),)
"""The family's name of a layer's router."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``GptOssConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf["rope_scaling"] = YARN
    num_layers, bias = require_int(hf, "num_hidden_layers"), optional_flag(hf, "attention_bias", True)
    kinds = hf.get("layer_types") or [KINDS[layer % 2] for layer in range(num_layers)]
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        layer_windows=windows_from_layer_types({**hf, "layer_types": kinds}, 0),
        qkv_bias=bias,
        output_bias=bias,
        experts=experts_everywhere(
            hf,
            128,
            4,
            bias=True,
            gate=ClampedGate(
                alpha=number(hf.get("swiglu_alpha", 1.702), "swiglu_alpha", 1e-6, 1e6),
                limit=number(hf.get("swiglu_limit", 7.0), "swiglu_limit", 1e-6, 1e6),
            ),
        ),
        **TRAITS,
    )


READS = (
    *("attention_bias", "sliding_window", "layer_types", "num_local_experts", "num_experts", "num_experts_per_tok"),
    *("swiglu_alpha", "swiglu_limit"),
)


def from_gguf(keys: Keys) -> dict[str, Any]:
    """Return the fields of a file. Its YaRN is that of the published models, whose ramp is not rounded."""
    fields = {**expert_fields(keys), "intermediate_size": keys.get("expert_feed_forward_length")}
    return {**fields, "sliding_window": keys.get("attention.sliding_window"), "rope_scaling": {"truncate": False}}


GGUF = GgufForm(
    "gpt-oss",
    from_gguf,
    (*EXPERTS, "expert_feed_forward_length", "attention.sliding_window"),
    {"post_attention_norm": "post_attention_layernorm"},
    has_experts=True,
)
FAMILY = Family(
    MODEL_TYPE, "GptOssForCausalLM", from_hf, TRAITS, weight_names=NAMES, stacked=STACKED, reads=READS, gguf=GGUF
)
