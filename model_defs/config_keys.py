"""Every key of a ``config.json`` that transformers reads for the supported families: used, fixed or ignored.

A key is *used* when a family reads it: those of ``USED`` all families do, others are in the ``reads`` of a ``Family``.
It is *fixed* when transformers' models obey it and this project's do not: another value than those here, or in the
family's ``fixed``, is refused by name. It is *ignored* when it does not change what the model computes.
"""

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.errors import ModelError
from model_defs.family import Family

USED = frozenset({
    "model_type", "text_config", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps",
    "max_position_embeddings", "original_max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config",
})  # fmt: skip
"""Read in every family."""

FIXED: Mapping[str, tuple[Any, ...]] = {"per_layer_config": ({},), "is_encoder_decoder": (False,)}
"""The values of each key that change nothing, in every family; null is one more."""

MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys that say how many layers behind the model's predict more than the next token."""


def is_of_mtp(key: str) -> bool:
    """Whether a key of ``config.json`` is of layers or modules that predict more than the next token."""
    return key in MTP_LAYERS or key.startswith("mtp_")


_TRAINING, _HEADS = "for training only", "for classification heads"
_OUTPUTS, _KERNELS = "which outputs a call returns", "which kernels compute it, with the same result"
_LOADING = "where the file came from, or who wrote it"
_DRAWN = "how weights are drawn before training"
_MAMBA = "read with layers of Mamba-2, in the families that have them; others are refused where a layer is one"
_LEFT_OUT = "layers that predict more than one token are left out, and a note says so"
_EXPERTS = "read with a mixture of experts; where enable_moe_block says whether there is one, that is fixed"
IGNORED: Mapping[str, str] = {
    "attention_dropout": _TRAINING,
    "embd_pdrop": _TRAINING,
    "resid_pdrop": _TRAINING,
    "hidden_dropout": _TRAINING,
    "initializer_range": _TRAINING,
    "router_aux_loss_coef": _TRAINING,
    "router_jitter_noise": _TRAINING,
    "output_router_logits": _OUTPUTS,
    "output_attentions": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "return_dict": _OUTPUTS,
    "num_logits_to_keep": _OUTPUTS,
    "z_loss_coefficient": _TRAINING,
    "num_labels": _HEADS,
    "id2label": _HEADS,
    "label2id": _HEADS,
    "problem_type": _HEADS,
    "_attn_implementation": _KERNELS,
    "attn_implementation": _KERNELS,
    "experts_implementation": _KERNELS,
    "chunk_size_feed_forward": _KERNELS,
    "pretraining_tp": "transformers 5 reads it and computes the same with any value",
    "_commit_hash": _LOADING,
    "_name_or_path": _LOADING,
    "name_or_path": _LOADING,
    "transformers_version": _LOADING,
    "architectures": "model_type says which model it is; target vllm is told the class where it needs one",
    "dtype": "the tensors say in what they are stored; --dtype says in what they are computed",
    "torch_dtype": "as dtype",
    "use_cache": "an engine always has a cache",
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "top_k_experts", "moe_intermediate_size"), _EXPERTS),
    **dict.fromkeys((f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand",
                     "chunk_size", "conv_bias", "proj_bias")), _MAMBA),
    "time_step_limit": _MAMBA,
    "expand": "the number and the size of Mamba-2's heads are read in its place",
    "chunk_size": _KERNELS,
    "use_mamba_kernels": _KERNELS,
    "moe_shared_expert_overlap": _KERNELS,
    "mamba_ssm_cache_dtype": "states are always in float32",
    "time_step_min": "transformers alone bounds steps by it, in prompts only, not in decode steps",
    **dict.fromkeys(("time_step_max", "time_step_floor", "rescale_prenorm_residual"), _DRAWN),
    **dict.fromkeys((f"mamba_dt_{name}" for name in ("min", "max", "init_floor")), _DRAWN),
    "num_global_key_value_heads": "read with attention_k_eq_v, which is fixed",
    **dict.fromkeys((*MTP_LAYERS, "mtp_layers_block_type", "mtp_hybrid_override_pattern"), _LEFT_OUT),
    "pad_token_id": "sequences are packed and never padded",
}  # fmt: skip
"""Why each of these keys changes nothing."""


def check_fixed(hf: Mapping[str, Any], family: Family) -> None:
    """Raise ModelError where a ``config.json`` has a key that the family's models in transformers obey and this
    project's do not."""
    for key, neutral in {**FIXED, **family.fixed}.items():
        value = hf.get(key)
        if key in family.reads or value is None or any(_is(value, each) for each in neutral):
            continue
        allowed = " or ".join(json.dumps(each) for each in neutral or (None,))
        raise ModelError(f"{key} {reprlib.repr(value)} of {family.model_type} is not supported; it must be {allowed}.")


def _is(value: Any, other: Any) -> bool:
    """Equal and of one type: 0 is not false."""
    return type(value) is type(other) and bool(value == other)
