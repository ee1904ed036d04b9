"""A model family in one file: biases of q, k and v together with norms of q and k, a window in all layers but every
third, and names of its own for the fields of config.json and for every tensor."""

from collections.abc import Mapping
from typing import Any

from model_defs import Family, ModelConfig
from model_defs.fields import require_int
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "novel"
TRAITS = {"qkv_bias": True, "qk_norm": True}
FIELDS = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "head_dim": "d_head",
    "max_position_embeddings": "n_ctx",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
}
"""The family's name of each field that goes by another name elsewhere."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a novel model's config.json; raises ModelError."""
    hf = {**hf, **{name: hf[own] for name, own in FIELDS.items() if own in hf}}
    window = require_int(hf, "local_window")
    windows = tuple(0 if layer % 3 == 2 else window for layer in range(require_int(hf, "num_hidden_layers")))
    return config_from_hf(hf, model_type=MODEL_TYPE, layer_windows=windows, **TRAITS)


FAMILY = Family(
    MODEL_TYPE,
    "NovelForCausalLM",
    from_hf,
    TRAITS,
    weight_names=(
        (r"^tok_embed\.", "model.embed_tokens."),
        (r"^final_norm\.", "model.norm."),
        (r"^output\.", "lm_head."),
        (r"^blocks\.", "model.layers."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.w([qkvo])\.", r".self_attn.\1_proj."),
        (r"\.attn\.([qk])_gain\.", r".self_attn.\1_norm."),
        (r"\.ffn\.(gate|up|down)\.", r".mlp.\1_proj."),
    ),
)
