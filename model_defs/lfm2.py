"""LFM2: gated short convolutions in most layers, attention in the others."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.family import Family
from model_defs.fields import number, optional_flag, optional_int, require_int
from model_defs.gated_conv import GatedConv
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "lfm2"
TRAITS: dict[str, Any] = {"qk_norm": True}
CONV, FULL = "conv", "full_attention"
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What ``Lfm2Config`` takes where config.json lacks the field."""
READS = (
    *("norm_eps", "conv_L_cache", "full_attn_idxs", "layer_types", "tie_embedding", "block_ff_dim"),
    *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
)
NAMES = (
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.conv\.conv\.", ".linear_attn.conv1d."),
    (r"\.conv\.(in|out)_proj\.", r".linear_attn.\1_proj."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"^model\.embedding_norm\.", "model.norm."),
)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Lfm2Config`` dictionary; raises ModelError."""
    tied = optional_flag(hf, "tie_embedding", optional_flag(hf, "tie_word_embeddings", True))
    own = {"intermediate_size": _intermediate_size(hf), "rms_norm_eps": hf.get("norm_eps", 1e-5)}
    return config_from_hf(
        {**DEFAULTS, **hf, **own, "tie_word_embeddings": tied},
        model_type=MODEL_TYPE,
        linear=_convolutions(hf),
        **TRAITS,
    )


def _intermediate_size(hf: Mapping[str, Any]) -> int:
    """Two thirds of what config.json says times a factor, rounded up to a multiple, where it is adjusted."""
    size = optional_int(hf, "block_ff_dim", optional_int(hf, "intermediate_size", 12288))
    if not optional_flag(hf, "block_auto_adjust_ff_dim", True):
        return size
    factor, multiple = hf.get("block_ffn_dim_multiplier", 1.0), optional_int(hf, "block_multiple_of", 256)
    size = int(2 * size / 3)
    if factor is None:
        return size
    size = int(number(factor, "block_ffn_dim_multiplier", 2.0**-10, 2.0**10) * size)
    return -(-size // multiple) * multiple


def _convolutions(hf: Mapping[str, Any]) -> GatedConv | None:
    """The layers with convolutions, None where all have attention; raises ModelError where none has."""
    num_layers, kinds = require_int(hf, "num_hidden_layers"), hf.get("layer_types")
    if kinds is None:
        full = hf.get("full_attn_idxs")
        if full is not None and not (isinstance(full, list) and all(type(each) is int for each in full)):
            raise ModelError(f"full_attn_idxs is {reprlib.repr(full)} in config.json; it must be a list of layers.")
        kinds = [FULL if full is None or layer in full else CONV for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (CONV, FULL) for kind in kinds):
        raise ModelError(
            f"layer_types is {reprlib.repr(kinds)} in config.json; it must say {CONV} or {FULL} of each of the "
            f"{num_layers} layers."
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == CONV)
    if len(layers) == num_layers:
        raise ModelError(f"All layers of the model have convolutions; at least one must have {FULL}.")
    width = optional_int(hf, "conv_L_cache", 3)
    return GatedConv(layers, require_int(hf, "hidden_size"), width) if layers else None


FAMILY = Family(
    MODEL_TYPE,
    "Lfm2ForCausalLM",
    from_hf,
    TRAITS,
    weight_names=NAMES,
    reads=READS,
    ignored={"rms_norm_eps": "norm_eps is read in its place"},
    fixed={"conv_bias": (False,)},
)
