"""DeepSeek-V2 and V2-Lite: latent attention, and a mixture of experts with shared ones (arXiv 2405.04434)."""

import reprlib
from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.errors import ModelError
from model_defs.experts import Experts, count_experts
from model_defs.family import Family
from model_defs.fields import number, optional_flag, optional_int, require_int
from model_defs.hf_config import config_from_hf
from model_defs.latent import latent_from_hf
from model_defs.rope_reading import rope_from_hf, score_growth

MODEL_TYPE = "deepseek_v2"
DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What ``DeepseekV2Config`` takes where config.json lacks the field."""

QUERY_RANK = 1536
FIXED = {"scoring_func": ("softmax",), "attention_bias": (False,), "mlp_bias": (False,)}
IGNORED = {
    "head_dim": "qk_rope_head_dim says it, as in transformers",
    "num_key_value_heads": "all heads share the latents; transformers fails where it is not num_attention_heads",
}
READS = (
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "first_k_dense_replace", "moe_layer_freq", "topk_method", "topk_group", "n_group"),
    *("norm_topk_prob", "routed_scaling_factor"),
)


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``DeepseekV2Config`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    latent = latent_from_hf(hf, QUERY_RANK)
    rope = rope_from_hf(hf, interleaved=True)
    num_layers = require_int(hf, "num_hidden_layers")
    dense = [layer for layer in range(num_layers) if not _is_sparse(hf, layer)]
    return config_from_hf(
        {**hf, "num_key_value_heads": 1, "head_dim": latent.width},
        model_type=MODEL_TYPE,
        rope=rope,
        latent=latent,
        attention_scale=latent.query_dim**-0.5 * score_growth(hf),
        experts=_experts(hf, num_layers) if len(dense) < num_layers else None,
    )


def _is_sparse(hf: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts: every ``moe_layer_freq``-th from ``first_k_dense_replace`` on."""
    first = optional_int(hf, "first_k_dense_replace", 0, minimum=0)
    return layer >= first and layer % optional_int(hf, "moe_layer_freq", 1) == 0


def _experts(hf: Mapping[str, Any], num_layers: int) -> Experts:
    """The mixture. Probabilities that are normed are not scaled, as in the published model's code."""
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"topk_method {reprlib.repr(method)} is not supported; supported are greedy and group_limited_greedy."
        )
    has_groups, active = method != "greedy", optional_int(hf, "num_experts_per_tok", 1)
    normalize = optional_flag(hf, "norm_topk_prob") and active > 1
    scaling = number(hf.get("routed_scaling_factor", 1.0), "routed_scaling_factor", 1e-6, 1e6)
    routed = optional_int(hf, "n_routed_experts", count_experts(hf, 64))
    return Experts(
        num_experts=routed,
        num_active=active,
        intermediate_size=require_int(hf, "moe_intermediate_size"),
        normalize=normalize,
        layers=tuple(layer for layer in range(num_layers) if _is_sparse(hf, layer)),
        scaling=1.0 if normalize else scaling,
        num_shared=optional_int(hf, "n_shared_experts", 2, minimum=0),
        num_groups=optional_int(hf, "n_group", 1) if has_groups else 1,
        num_active_groups=optional_int(hf, "topk_group", 1) if has_groups else 1,
    )


FAMILY = Family(MODEL_TYPE, "DeepseekV2ForCausalLM", from_hf, reads=READS, fixed=FIXED, ignored=IGNORED)
