"""Kimi-Linear: three layers with Kimi Delta Attention to one with latent attention without RoPE (arXiv 2510.26692), and
experts by sigmoids."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from model_defs.channel_delta import ChannelDelta
from model_defs.config import ModelConfig
from model_defs.deepseek_v2 import IGNORED
from model_defs.errors import ModelError
from model_defs.experts import FIXED_BY_SIGMOID, experts_by_sigmoid
from model_defs.family import Family
from model_defs.fields import optional_int, require_int
from model_defs.hf_config import config_from_hf
from model_defs.latent import latent_from_hf
from model_defs.linear import FULL, LINEAR
from model_defs.rope_config import UNROTATED

MODEL_TYPE = "kimi_linear"
DEFAULTS = {
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
}
"""What ``KimiLinearConfig`` takes where config.json lacks the field."""

OTHER_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""What the family calls keys, and what other families call them, by which transformers knows them too."""

OF_STATES = {
    "num_heads": ("linear_num_heads", 32),
    "head_dim": ("linear_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}
"""Keys of ``linear_attn_config``, what they are called where there is none, and what they are without either."""

LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}
"""Keys of ``linear_attn_config`` that number the layers of each kind, from 1 on."""

DENSE, SPARSE = "dense", "sparse"
NAMES = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
    (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
    (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``KimiLinearConfig`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **_renamed(hf)}
    kinds, latent = _kinds(hf), latent_from_hf(hf, query_rank=None)
    return config_from_hf(
        {**hf, "num_key_value_heads": 1, "head_dim": latent.width},
        model_type=MODEL_TYPE,
        rope=UNROTATED,
        unrotated_layers=tuple(range(len(kinds))),
        latent=latent,
        attention_scale=latent.query_dim**-0.5,
        experts=experts_by_sigmoid(hf, 256, _sparse(hf, len(kinds))),
        linear=_linear(hf, [layer for layer, kind in enumerate(kinds) if kind == LINEAR]),
    )


def _renamed(hf: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in hf.items() if key not in OTHER_NAMES}
    for own, other in OTHER_NAMES.items():
        if hf.get(own) is None:
            continue
        if found.get(other) not in (None, hf[own]):
            raise ModelError(f"{own} and {other} of config.json differ; they are one number.")
        found[other] = hf[own]
    return found


def _of_states(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """``linear_attn_config``, empty where there is none."""
    found = hf.get("linear_attn_config") or {}
    if not isinstance(found, Mapping):
        raise ModelError(f"linear_attn_config is {reprlib.repr(found)} in config.json; it must be an object.")
    if unknown := sorted(map(str, found.keys() - OF_STATES.keys() - LISTS.keys())):
        raise ModelError(
            f"linear_attn_config of config.json has {reprlib.repr(unknown[0])}, which is not supported; it may have "
            f"{', '.join((*OF_STATES, *LISTS))}."
        )
    return found


def _linear(hf: Mapping[str, Any], layers: Sequence[int]) -> ChannelDelta | None:
    sizes = {}
    for key, (other, default) in OF_STATES.items():
        found = _of_states(hf)
        sizes[key] = optional_int(found, key, optional_int(hf, other, default))
        if optional_int(hf, other, sizes[key]) != sizes[key]:
            raise ModelError(f"{key} of linear_attn_config and {other} of config.json differ; they are one number.")
    if not layers:
        return None
    return ChannelDelta(tuple(layers), sizes["num_heads"], sizes["head_dim"], sizes["short_conv_kernel_size"])


def _kinds(hf: Mapping[str, Any]) -> list[str]:
    """Return what each layer is: as ``layer_types`` or ``linear_attn_config`` say, or every fourth one with K and V but
    the first; raises ModelError."""
    num_layers, said, numbered = require_int(hf, "num_hidden_layers"), hf.get("layer_types"), _numbered(hf)
    kinds = said or numbered
    if kinds is None:
        kinds = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (LINEAR, FULL) for kind in kinds):
        raise ModelError(
            f"layer_types is {reprlib.repr(kinds)} in config.json; it must say {LINEAR} or {FULL} of each of the "
            f"{num_layers} layers."
        )
    if numbered is not None and kinds != numbered:
        raise ModelError("layer_types and linear_attn_config of config.json differ on the layers; they are one list.")
    if FULL not in kinds:
        raise ModelError(f"All layers of the model have linear attention; at least one must have {FULL}.")
    return kinds


def _numbered(hf: Mapping[str, Any]) -> list[str] | None:
    """Return the same as ``linear_attn_config`` says it, None where it does not."""
    lists = {key: _of_states(hf).get(key) for key in LISTS}
    if all(each is None for each in lists.values()):
        return None
    num_layers, of_layer = require_int(hf, "num_hidden_layers"), dict[Any, str]()
    for key, kind in LISTS.items():
        numbers = lists[key]
        if not isinstance(numbers, list) or any(type(number) is not int or number in of_layer for number in numbers):
            of_layer = {}
            break
        of_layer |= dict.fromkeys(numbers, kind)
    if sorted(of_layer) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"{' and '.join(LISTS)} of linear_attn_config in config.json must number each of the {num_layers} layers "
            "once, from 1 on."
        )
    return [of_layer[number] for number in sorted(of_layer)]


def _sparse(hf: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the layers with experts; raises ModelError."""
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        return list(range(optional_int(hf, "first_k_dense_replace", 1, minimum=0), num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (DENSE, SPARSE) for kind in kinds):
        raise ModelError(
            f"mlp_layer_types is {reprlib.repr(kinds)} in config.json; it must say {DENSE} or {SPARSE} of each of the "
            f"{num_layers} layers."
        )
    return [layer for layer, kind in enumerate(kinds) if kind == SPARSE]


FAMILY = Family(
    MODEL_TYPE,
    "KimiLinearForCausalLM",
    from_hf,
    weight_names=NAMES,
    reads=(
        *OTHER_NAMES,
        *(name for name in OTHER_NAMES.values() if name != "max_position_embeddings"),
        *("linear_attn_config", "layer_types", "mlp_layer_types", "first_k_dense_replace"),
        *(other for other, _ in OF_STATES.values()),
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("moe_intermediate_size", "topk_group", "routed_scaling_factor"),
    ),
    fixed={
        "attention_bias": (False,),
        **FIXED_BY_SIGMOID,
        **{"moe_router_activation_func": ("sigmoid",), "use_grouped_topk": (True,), "mla_use_nope": (True,)},
    },
    ignored={
        **IGNORED,
        **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"), "no layer rotates"),
        "original_max_position_embeddings": "no layer rotates",
    },
)
