"""Gemma 3's text models: five layers with a sliding window to one without, each kind with a rotation of its own."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.family import Family
from model_defs.fields import number, optional_flag, optional_int, require_int
from model_defs.gguf_form import GgufForm, Keys
from model_defs.hf_config import config_from_hf, windows_from_layer_types
from model_defs.model_shape import LayerNorms
from model_defs.rope_config import RopeConfig
from model_defs.rope_reading import rope_from_hf

MODEL_TYPE = "gemma3_text"
TRAITS = {"qk_norm": True, "branch_norms": True}
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""What ``Gemma3TextConfig`` takes where config.json lacks the field."""

NORMS = LayerNorms("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
PATTERN = 6
"""Every so many layers one has no window, unless config.json says otherwise."""

KINDS = ("full_attention", "sliding_attention")
THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
OLD_THETAS = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Gemma3TextConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    bias = optional_flag(hf, "attention_bias")
    ropes = ropes_by_kind(hf)
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        activation="gelu_tanh",
        layer_windows=windows_by_pattern(hf),
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=number(hf.get("query_pre_attn_scalar", 256), "query_pre_attn_scalar", 1e-6, 1e6) ** -0.5,
        embedding_scale=require_int(hf, "hidden_size") ** 0.5,
        norm_offset=1.0,
        layer_norms=NORMS,
        rope=ropes["full_attention"],
        local_rope=ropes["sliding_attention"],
        **TRAITS,
    )


def windows_by_pattern(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return each layer's window, by ``layer_types`` or ``sliding_window_pattern``; raises ModelError."""
    kinds, pattern = hf.get("layer_types"), optional_int(hf, "sliding_window_pattern", PATTERN)
    if kinds is None:
        kinds = [KINDS[(layer + 1) % pattern != 0] for layer in range(require_int(hf, "num_hidden_layers"))]
    windows = windows_from_layer_types({**hf, "layer_types": kinds}, 0)
    if 0 in (window for window, kind in zip(windows, kinds, strict=True) if kind == "sliding_attention"):
        raise ModelError("config.json has layers of sliding_attention and no sliding_window; it needs one.")
    return windows


def ropes_by_kind(hf: Mapping[str, Any], may_be_partial: bool = False) -> dict[str, RopeConfig]:
    """Return the rotation of each kind of layer: one object in ``rope_parameters`` for each, or in older files
    ``rope_theta`` with ``rope_scaling`` for those without a window, and ``rope_local_base_freq``."""
    given = hf.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or not all(isinstance(given.get(kind) or {}, Mapping) for kind in KINDS):
        raise ModelError(
            f"rope_parameters must be an object with one for each of {' and '.join(KINDS)}, found "
            f"{reprlib.repr(given)}."
        )
    ropes = {}
    for kind in KINDS:
        old = (hf.get("rope_scaling") or {}) if kind == "full_attention" else {}
        theta = hf.get(OLD_THETAS[kind], THETAS[kind])
        fields = {**hf, "rope_theta": theta, "rope_scaling": old, "rope_parameters": given.get(kind)}
        ropes[kind] = rope_from_hf(fields, may_be_partial=may_be_partial)
    return ropes


READS = (
    *("layer_types", "sliding_window", "sliding_window_pattern", "query_pre_attn_scalar"),
    *("attention_bias", "rope_local_base_freq"),
)
FIXED = {"final_logit_softcapping": (), "attn_logit_softcapping": (), "use_bidirectional_attention": (False,)}


LARGEST_DEPTH = 62
"""Layers of the 27B model, the only one whose scores are not scaled by the size of a head; files do not say it."""


def from_gguf(keys: Keys) -> dict[str, Any]:
    """Return the fields of a file."""
    heads, size = keys["attention.head_count"], keys["attention.key_length"]
    scalar = keys["embedding_length"] // heads if keys["block_count"] == LARGEST_DEPTH else size
    pattern = keys.get("attention.sliding_window_pattern", PATTERN)
    fields = {"query_pre_attn_scalar": scalar, "sliding_window": keys.get("attention.sliding_window")}
    if isinstance(pattern, list):
        fields["layer_types"] = [KINDS[bool(slides)] for slides in pattern]
    else:
        fields["sliding_window_pattern"] = pattern if fields["sliding_window"] else 1
    return {
        **fields,
        "rope_local_base_freq": keys.get("rope.freq_base_swa", THETAS["sliding_attention"]),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


GGUF = GgufForm(
    "gemma3",
    from_gguf,
    ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping"),
)
FAMILY = Family(
    MODEL_TYPE,
    "Gemma3ForCausalLM",
    from_hf,
    TRAITS,
    text_part_of=("gemma3",),
    reads=READS,
    fixed=FIXED,
    gguf=GGUF,
)
