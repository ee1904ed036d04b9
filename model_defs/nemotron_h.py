"""Nemotron-H and Nemotron 3 Nano: a layer is one of Mamba-2, attention without RoPE, an MLP, or a mixture of experts by
sigmoids; MLPs and experts have no gate."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.experts import experts_by_sigmoid
from model_defs.family import Family
from model_defs.fields import optional_flag, optional_int
from model_defs.hf_config import config_from_hf
from model_defs.mamba2 import ATTENTION, FIXED, MAMBA, Mamba2
from model_defs.model_shape import LayerNorms
from model_defs.rope_config import UNROTATED

MODEL_TYPE = "nemotron_h"
DEFAULTS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
    "n_routed_experts": None,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What ``NemotronHConfig`` takes where config.json lacks the field."""

MLP, MOE = "mlp", "moe"
LETTERS = {"M": MAMBA[0], "*": ATTENTION[0], "-": MLP, "E": MOE}
WORDS = {**dict.fromkeys(MAMBA, MAMBA[0]), **dict.fromkeys(ATTENTION, ATTENTION[0]), MLP: MLP, MOE: MOE}
LISTS: Mapping[str, tuple[type[list[Any]] | type[str], Mapping[str, str]]] = {
    "layers_block_type": (list, WORDS),
    "layer_types": (list, WORDS),
    "hybrid_override_pattern": (str, LETTERS),
}
"""Keys that say what each layer is, of what type they are, and what they call each kind."""

OTHER_NAMES = ("mamba_n_groups", "mamba_d_conv", "mamba_dt_limit")
"""What old files call keys that are read."""

IGNORED = {
    **dict.fromkeys(
        ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
        "no layer rotates",
    ),
    "rms_norm_eps": "layer_norm_epsilon is read in its place",
}
NAMES = (
    (r"^(backbone|model)\.embeddings\.", "model.embed_tokens."),
    (r"^(backbone|model)\.norm_f\.", "model.norm."),
    (r"^backbone\.", "model."),
    (r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm."),
    (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
    (r"\.mixer\.((in_proj|out_proj|conv1d|norm)\.|(A_log|D|dt_bias)$)", r".linear_attn.\1"),
    (r"\.mixer\.(up_proj|down_proj|gate|experts|shared_experts)\.", r".mlp.\1."),
)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``NemotronHConfig`` dictionary; raises ModelError."""
    kinds = _kinds(hf)
    hf = {**DEFAULTS, **hf, "num_hidden_layers": len(kinds), "rms_norm_eps": hf.get("layer_norm_epsilon", 1e-5)}
    layers = {kind: tuple(layer for layer, each in enumerate(kinds) if each == kind) for kind in LETTERS.values()}
    for kind in (MAMBA[0], ATTENTION[0]):
        if not layers[kind]:
            raise ModelError(f"No layer of the model is of {kind}; at least one must be of it.")
    bias, shared = optional_flag(hf, "mlp_bias"), optional_int(hf, "moe_shared_expert_intermediate_size", 7688)
    experts = experts_by_sigmoid(hf, 8, layers[MOE], shared) if layers[MOE] else None
    if bias and experts:
        raise ModelError("mlp_bias is true in config.json, which is not supported in a model with experts.")
    return config_from_hf(
        hf,
        model_type=MODEL_TYPE,
        rope=UNROTATED,
        unrotated_layers=tuple(range(len(kinds))),
        layer_norms=LayerNorms(before_mlp="input_layernorm"),
        layers_without_mixer=tuple(sorted(layers[MLP] + layers[MOE])),
        layers_without_mlp=tuple(sorted(layers[MAMBA[0]] + layers[ATTENTION[0]])),
        activation="relu2",
        mlp_bias=bias,
        experts=experts,
        linear=Mamba2(
            layers=layers[MAMBA[0]],
            num_heads=optional_int(hf, "mamba_num_heads", 128),
            head_dim=optional_int(hf, "mamba_head_dim", 64),
            num_groups=optional_int(hf, "n_groups", 8),
            state_dim=optional_int(hf, "ssm_state_size", 128),
            conv_width=optional_int(hf, "conv_kernel", 4),
        ),
    )


def _kinds(hf: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer; raises ModelError."""
    found: dict[str, list[str]] = {}
    for key, (form, known) in LISTS.items():
        said: Any = hf.get(key)
        if said is None:
            continue
        if not isinstance(said, form) or not all(isinstance(each, str) and each in known for each in said):
            raise ModelError(
                f"{key} is {reprlib.repr(said)} in config.json; it must say {', '.join(known)} of each layer."
            )
        found[key] = [known[each] for each in said]
    if not found:
        raise ModelError(f"config.json needs {' or '.join(LISTS)}, which says what each layer is.")
    (first, kinds), *others = found.items()
    for key, each in others:
        if each != kinds:
            raise ModelError(f"{first} and {key} of config.json differ; they are one list.")
    if optional_int(hf, "num_hidden_layers", len(kinds)) != len(kinds):
        raise ModelError(
            f"num_hidden_layers is {hf['num_hidden_layers']} in config.json, but {first} says what {len(kinds)} layers "
            "are."
        )
    return kinds


FAMILY = Family(
    MODEL_TYPE,
    "NemotronHForCausalLM",
    from_hf,
    weight_names=NAMES,
    is_rewired=False,
    reads=(
        *LISTS,
        *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "layer_norm_epsilon"),
        *("mlp_bias", "moe_shared_expert_intermediate_size", "n_routed_experts", "num_local_experts"),
        *("num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group", "norm_topk_prob"),
        "routed_scaling_factor",
    ),
    fixed={
        **FIXED,
        **dict.fromkeys(OTHER_NAMES, ()),
        **dict.fromkeys(("attention_bias", "use_bias", "residual_in_fp32"), (False,)),
        **{"use_conv_bias": (True,), "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)},
        **{"n_shared_experts": (1,), "moe_latent_size": (), "sliding_window": ()},
    },
    ignored=IGNORED,
)
