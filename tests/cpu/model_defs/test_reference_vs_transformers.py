"""The plain reference agrees with Hugging Face transformers on every family."""

import json

import pytest
import torch
import transformers

from model_defs import load_config
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import ALL_FAMILIES, load_weights, make_checkpoint
from tests.support.rounding import assert_near, model_error

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8],
    "long_factor": [1.1, 1.4, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
}
CASES = {family: (family, {}) for family in ALL_FAMILIES} | {
    "llama-3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2-yarn-ramp": ("qwen2", {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False}}),
    "qwen3-yarn-amplitude": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.4}}),
    "mistral-yarn-mscale": (
        "mistral",
        {"rope_parameters": {**YARN, "beta_fast": None, "beta_slow": 0, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "llama-yarn-without-factor": (
        "llama",
        {"rope_parameters": {**YARN, "factor": None}, "max_position_embeddings": 256},
    ),
    "llama-yarn-top-level-length": (
        "llama",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
    ),
    "llama-longrope-short": ("llama", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 90}),
    "llama-longrope-long": ("llama", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}),
    "llama-longrope-factor": (
        "llama",
        {"rope_parameters": {**LONGROPE, "factor": 8.0}, "original_max_position_embeddings": 40},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-mqa": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "exaone4-global": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "glm4_moe-odd": (
        "glm4_moe",
        {"num_experts": 9, "num_local_experts": 9, "n_group": 3, "use_qk_norm": False, "attention_bias": True},
    ),
    "glm4_moe-no-groups": ("glm4_moe", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 0}),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {"rope_interleave": False, "num_attention_heads": 5, "first_k_dense_replace": 0},
    ),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_reference_equals_transformers(case: str, tmp_path) -> None:
    family, overrides = CASES[case]
    path = make_checkpoint(tmp_path / "model", family, **overrides)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    input_ids = torch.randint(3, 320, (1, 90))
    with torch.no_grad():
        expected = model(input_ids).logits[0]
    config = load_config(json.loads((path / "config.json").read_text())).for_length(input_ids.shape[1])
    actual = reference_logits(config, load_weights(path), input_ids[0])
    assert_near(actual, expected, model_error(config, input_ids.shape[1]))


def test_old_and_new_rope_spelling_agree() -> None:
    base = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = load_config(base | {"rope_theta": 10000.0, "rope_scaling": scaling})
    assert old.rope == load_config(base | {"rope_parameters": LLAMA3}).rope
