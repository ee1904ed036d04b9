"""Sizes of published models, as their config.json says them; the fields that sizes and arithmetic do not need are left
out. Each can be cut to its first layers."""

from collections.abc import Mapping
from typing import Any

_NO_ROPE_EACH_FOURTH = [1, 1, 1, 0]
_FULL_EACH_FOURTH = [*["sliding_attention"] * 3, "full_attention"]

PUBLISHED: Mapping[str, dict[str, Any]] = {
    "SmolLM3-3B": {
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "max_position_embeddings": 65536, "rope_theta": 5000000.0, "rms_norm_eps": 1e-6,
        "no_rope_layers": _NO_ROPE_EACH_FOURTH * 9, "no_rope_layer_interval": 4, "tie_word_embeddings": True,
    },
    "OLMo-2-7B": {
        "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "rope_theta": 500000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "Olmo-3-7B": {
        "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 8192, "rope_theta": 500000, "rms_norm_eps": 1e-6, "sliding_window": 4096,
        "layer_types": _FULL_EACH_FOURTH * 8, "tie_word_embeddings": False,
    },
    "Granite-3.3-8B": {
        "model_type": "granite", "vocab_size": 49159, "hidden_size": 4096, "intermediate_size": 12800,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 10000000.0, "rms_norm_eps": 1e-5,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "logits_scaling": 16.0, "tie_word_embeddings": True,
    },
    "Granite-3.1-3B-A800M": {
        "model_type": "granitemoe", "vocab_size": 49155, "hidden_size": 1536, "intermediate_size": 512,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "num_local_experts": 40,
        "num_experts_per_tok": 8, "max_position_embeddings": 131072, "rope_theta": 10000000.0, "rms_norm_eps": 1e-6,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "logits_scaling": 6.0, "tie_word_embeddings": True,
    },
    "Granite-4.0-Micro": {
        "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 8192, "position_embedding_type": "rope",
        "layer_types": ["attention"] * 40, "max_position_embeddings": 131072, "rope_theta": 10000000.0,
        "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22, "logits_scaling": 10.0, "tie_word_embeddings": True,
    },
    "Ministral-3-8B": {
        "model_type": "ministral3", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "EXAONE-4.0-32B": {
        "model_type": "exaone4", "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 27392,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 1000000, "rms_norm_eps": 1e-5, "sliding_window": 4096,
        "sliding_window_pattern": "LLLG", "layer_types": _FULL_EACH_FOURTH * 16, "tie_word_embeddings": False,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": False,
        "max_position_embeddings": 131072, "rope_theta": 1000000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "rope_theta": 10000,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 262144, "rope_theta": 10000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "max_position_embeddings": 262144, "rope_theta": 10000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
        "rope_theta": 10000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "Bamba-9B": {
        "model_type": "bamba", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "mamba_expand": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "LFM2-1.2B": {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3, "conv_bias": False, "max_position_embeddings": 128000, "rope_theta": 1000000.0,
        "norm_eps": 1e-5, "tie_embedding": True,
    },
    "Granite-4.0-H-Tiny": {
        "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512,
        "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 64,
        "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "position_embedding_type": "nope",
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)], "mamba_n_heads": 48,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0078125, "residual_multiplier": 0.22, "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    },
    # From memory, but for the numbers of layers, heads and experts and the hidden size, which its model card has.
    "Nemotron-3-Nano-30B-A3B": {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856,
        "num_hidden_layers": 52, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "n_group": 1, "topk_group": 1, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "Kimi-Linear-48B-A3B": {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "layer_types": ["full_attention" if n % 4 == 3 or n == 26 else "linear_attention" for n in range(27)],
        "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
        "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 2.446,
        "model_max_length": 1048576, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
}  # fmt: skip

FEWER_EXPERTS: Mapping[str, dict[str, int]] = {
    "DeepSeek-V3": {"n_routed_experts": 32},
    "Qwen3-Next-80B-A3B": {"num_experts": 64},
    "Qwen3.5-35B-A3B": {"num_experts": 16},
    "Nemotron-3-Nano-30B-A3B": {"n_routed_experts": 32},
    "Kimi-Linear-48B-A3B": {"num_experts": 16},
}
"""In place of 256, 512, 256, 128 and 256, which are 2.8, 3.0, 1.5, 2.4 and 3.4 GiB a layer."""


def first_layers(name: str, num_layers: int) -> dict[str, Any]:
    """Return the config of the first layers of a model, with ``FEWER_EXPERTS``; where none of them would
    have K and V, as many that end with one that has."""
    config = {**PUBLISHED[name], "num_hidden_layers": num_layers}
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            start = max(0, config[key].index("attention") + 1 - num_layers) if "attention" in config[key] else 0
            config[key] = config[key][start : start + num_layers]
    if pattern := config.get("hybrid_override_pattern"):
        end = max(num_layers, pattern.index("*") + 1)
        config["hybrid_override_pattern"] = pattern[end - num_layers : end]
    if name == "DeepSeek-V3":
        config["first_k_dense_replace"] = min(2, num_layers - 1)
    if "full_attn_idxs" in config:
        config["full_attn_idxs"] = [layer for layer in config["full_attn_idxs"] if layer < num_layers]
    if "attn_layer_indices" in config:
        start = max(0, config["attn_layer_indices"][0] + 1 - num_layers)
        own = range(start, start + num_layers)
        config["attn_layer_indices"] = [layer - start for layer in config["attn_layer_indices"] if layer in own]
    return config | FEWER_EXPERTS.get(name, {})
