"""Gemma 4's text models: upper layers read the caches of lower ones, so that a prompt's tokens need not run them."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.family import Family
from model_defs.fields import number, optional_flag, optional_int, require_int
from model_defs.gemma3_text import NORMS, ropes_by_kind, windows_by_pattern
from model_defs.hf_config import config_from_hf

MODEL_TYPE = "gemma4_text"
TRAITS = {"qk_norm": True, "branch_norms": True, "v_norm": True, "layer_scalar": True}
DEFAULTS = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""What ``Gemma4TextConfig`` takes where config.json lacks the field."""

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


IGNORED = dict.fromkeys(
    ("rope_theta", "rope_scaling", "partial_rotary_factor"), "rope_parameters says it for each kind of layer"
)

SMALLEST_WIDTH = 16
"""Compiling takes gains of up to 8 elements for constants of the code."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``Gemma4TextConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    num_layers, bias = require_int(hf, "num_hidden_layers"), optional_flag(hf, "attention_bias")
    windows = windows_by_pattern(hf)
    windows = (*windows[:-1], 0)  # as transformers has it, whatever layer_types says
    num_shared = optional_int(hf, "num_kv_shared_layers", 0, minimum=0)
    if num_shared >= num_layers:
        raise ModelError(
            f"num_kv_shared_layers is {num_shared}; it must be below the {num_layers} of num_hidden_layers."
        )
    cut, inner = num_layers - num_shared, require_int(hf, "intermediate_size")
    is_double = optional_flag(hf, "use_double_wide_mlp") and num_shared > 0
    rotation = {key: value for key, value in hf.items() if key not in IGNORED}
    ropes = ropes_by_kind({**rotation, "rope_parameters": hf.get("rope_parameters") or ROPES}, may_be_partial=True)
    cap, width = hf.get("final_logit_softcapping"), optional_int(hf, "hidden_size_per_layer_input", 256, minimum=0)
    if 0 < width < SMALLEST_WIDTH:
        raise ModelError(f"hidden_size_per_layer_input is {width}; it must be 0 or at least {SMALLEST_WIDTH}.")
    return config_from_hf(
        {**hf, "num_key_value_layers": cut, "swiftkv": True, "key_value_group_size": None, "early_exit": None},
        model_type=MODEL_TYPE,
        activation="gelu_tanh",
        layer_windows=windows,
        layer_owners=_owners(windows, cut) if num_shared else (),
        layer_intermediate_sizes=(inner,) * cut + (2 * inner,) * num_shared if is_double else (),
        global_head_dim=_global_head_dim(hf, windows),
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=1.0,
        embedding_scale=require_int(hf, "hidden_size") ** 0.5,
        logit_cap=None if cap is None else number(cap, "final_logit_softcapping", 1e-3, 1e6),
        per_layer_input=width,
        per_layer_vocab=_table_rows(hf) if width else 0,
        layer_norms=NORMS,
        rope=ropes["full_attention"],
        local_rope=ropes["sliding_attention"],
        **TRAITS,
    )


def _owners(windows: Sequence[int], cut: int) -> tuple[int, ...]:
    """Layers from ``cut`` on read the cache of the last one below it that is of their kind."""
    last = {bool(windows[layer]): layer for layer in range(cut)}
    if any(bool(window) not in last for window in windows[cut:]):
        raise ModelError(
            "num_kv_shared_layers leaves no layer of some layer_types with a K,V cache of its own; config.json is "
            "damaged."
        )
    return (*range(cut), *(last[bool(window)] for window in windows[cut:]))


def _global_head_dim(hf: Mapping[str, Any], windows: Sequence[int]) -> int:
    """The size of heads in layers without a window, which files that transformers wrote give layer by layer, with names
    such as ``05``."""
    given = hf.get("per_layer_config")
    if given is None:
        return optional_int(hf, "global_head_dim", 512)
    if given == {}:
        return require_int(hf, "head_dim")
    expected = {str(layer) for layer, window in enumerate(windows) if not window}
    layers = {str(key).lstrip("0") or "0" for key in given} if isinstance(given, Mapping) else set()
    sizes = list(given.values()) if layers == expected else [None]
    if not isinstance(sizes[0], Mapping) or list(sizes[0]) != ["head_dim"] or sizes != sizes[:1] * len(sizes):
        raise ModelError(
            f"per_layer_config is {reprlib.repr(given)} in config.json; it must give one head_dim to all layers of "
            "full_attention, and nothing else."
        )
    return require_int(sizes[0], "head_dim")


def _table_rows(hf: Mapping[str, Any]) -> int:
    rows = optional_int(hf, "vocab_size_per_layer_input", 262144)
    if rows < require_int(hf, "vocab_size"):
        raise ModelError(f"vocab_size_per_layer_input is {rows}; it must be at least vocab_size.")
    return rows


READS = (
    *("layer_types", "sliding_window", "sliding_window_pattern", "attention_bias", "final_logit_softcapping"),
    *("num_kv_shared_layers", "use_double_wide_mlp", "global_head_dim", "per_layer_config"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)
FIXED = {
    "attention_k_eq_v": (False,),
    "enable_moe_block": (False,),
    "use_bidirectional_attention": (False, "vision"),
}
FAMILY = Family(
    MODEL_TYPE,
    "Gemma4ForCausalLM",
    from_hf,
    TRAITS,
    is_rewired=False,
    text_part_of=("gemma4",),
    reads=READS,
    fixed=FIXED,
    ignored=IGNORED,
)
"""It has a cut of its own where layers share caches, and no other."""
