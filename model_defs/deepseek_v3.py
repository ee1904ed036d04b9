"""DeepSeek-V3 and R1: DeepSeek-V2's latent attention, and experts by sigmoids (arXiv 2412.19437)."""

from collections.abc import Mapping
from typing import Any

from model_defs.config import ModelConfig
from model_defs.deepseek_v2 import IGNORED
from model_defs.experts import FIXED_BY_SIGMOID, READS_BY_SIGMOID, experts_by_sigmoid
from model_defs.family import Family
from model_defs.fields import optional_flag
from model_defs.hf_config import config_from_hf
from model_defs.latent import latent_from_hf
from model_defs.mtp import BEHIND_LAYERS
from model_defs.rope_reading import rope_from_hf, score_growth

MODEL_TYPE = "deepseek_v3"
DEFAULTS = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
"""What ``DeepseekV3Config`` takes where config.json lacks the field."""


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face ``DeepseekV3Config`` dictionary; raises ModelError."""
    hf = {**DEFAULTS, **hf}
    latent = latent_from_hf(hf, query_rank=1536)
    return config_from_hf(
        {**hf, "num_key_value_heads": 1, "head_dim": latent.width},
        model_type=MODEL_TYPE,
        rope=rope_from_hf(hf, interleaved=optional_flag(hf, "rope_interleave", True)),
        latent=latent,
        attention_scale=latent.query_dim**-0.5 * score_growth(hf),
        experts=experts_by_sigmoid(hf, count=256),
    )


READS = (
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rope_interleave"),
    *READS_BY_SIGMOID,
)
FIXED = {"attention_bias": (False,), **FIXED_BY_SIGMOID}
FAMILY = Family(
    MODEL_TYPE, "DeepseekV3ForCausalLM", from_hf, reads=READS, fixed=FIXED, ignored=IGNORED, mtp=BEHIND_LAYERS
)
