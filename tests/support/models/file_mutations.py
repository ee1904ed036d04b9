"""Checkpoints of every family with a few keys of their files changed, from a seed: values that a file may well have."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint.head import EMBEDDINGS, HEAD

KINDS = ("full_attention", "sliding_attention")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, "original_max_position_embeddings": 32},
    {"type": "yarn", "factor": 2.0, "attention_factor": 1.3, "beta_fast": 16, "truncate": False},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 1e6},
)
FIELDS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (319, 320, 321),
    "hidden_size": (32, 64, 128),
    "intermediate_size": (48, 96),
    "num_hidden_layers": (1, 2, 3, 4),
    "num_attention_heads": (2, 4, 8),
    "num_key_value_heads": (1, 2, 4, None),
    "head_dim": (8, 16, 32, None),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu", None),
    "hidden_activation": ("silu", "gelu_pytorch_tanh", None),
    "rms_norm_eps": (1e-6, 1e-5, 1e-2, 0.0),
    "max_position_embeddings": (16, 64, 4096),
    "original_max_position_embeddings": (16, 64),
    "rope_theta": (500.0, 10000.0, 1e6, 10000, None),
    "rope_scaling": (None, *ROPES),
    "rope_parameters": (None, {}, *ROPES),
    "rope_local_base_freq": (100.0, None),
    "partial_rotary_factor": (0.25, 0.5, 1.0, None),
    "tie_word_embeddings": (True, False, None),
    "attention_bias": (True, False, None),
    "mlp_bias": (True, False, None),
    "sliding_window": (3, 8, 4096, None),
    "sliding_window_pattern": (1, 2, 3),
    "use_sliding_window": (True, False, None),
    "max_window_layers": (0, 1, 9),
    "layer_types": (None, ["full_attention", "sliding_attention"], ["sliding_attention"] * 2, ["full_attention"] * 2),
    "query_pre_attn_scalar": (16, 100, 256),
    "final_logit_softcapping": (None, 5.0),
    "attn_logit_softcapping": (None, 5.0),
    "use_bidirectional_attention": (None, False, True, "all", "vision"),
    "per_layer_config": (None, {}, {"0": {"rms_norm_eps": 0.1}}, {"1": {"num_key_value_heads": 1}}),
    "num_experts": (8, 4, None),
    "num_local_experts": (8, 4, None),
    "num_experts_per_tok": (1, 2, 3),
    "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0], None),
    "routed_scaling_factor": (1.0, 2.5),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "n_group": (1, 2, 4, None),
    "topk_group": (1, 2, None),
    "first_k_dense_replace": (0, 1, 2),
    "moe_layer_freq": (1, 2),
    "scoring_func": ("softmax", "sigmoid"),
    "qk_rope_head_dim": (8, 4),
    "q_lora_rank": (None, 16),
    "swiglu_limit": (7.0, 0.5),
    "swiglu_alpha": (1.702, 1.0),
    "num_kv_shared_layers": (0, 1),
    "hidden_size_per_layer_input": (0, 16),
    "use_double_wide_mlp": (True, False),
    "attention_k_eq_v": (True, False),
    "global_head_dim": (16, 32),
    "pretraining_tp": (1, 2),
    "router_jitter_noise": (0.0, 0.3),
    "attention_dropout": (0.0, 0.5),
    "pad_token_id": (None, 0, 5),
    "dtype": ("float32", "bfloat16"),
    "is_encoder_decoder": (False, True),
    "attention_multiplier": (2.0,),
    "logits_scaling": (2.0,),
}
"""What keys of ``config.json`` may say; the last two are other families'."""

Change = tuple[str, Callable[[Path], None]]


def change(rng: random.Random) -> Change:
    """One change to a checkpoint."""
    return rng.choice((_field, _field, _field, _field, _without, _tensors))(rng)


def edit_json(file: Path, key: str, *value: Any) -> None:
    """Set a key of a JSON file, or remove it."""
    content = json.loads(file.read_text())
    if value:
        content[key] = copy.deepcopy(value[0])
    else:
        content.pop(key, None)
    file.write_text(json.dumps(content))


def _field(rng: random.Random) -> Change:
    key = rng.choice(tuple(FIELDS))
    value = rng.choice(FIELDS[key])
    return f"{key} = {value}", lambda path: edit_json(path / "config.json", key, value)


def _without(rng: random.Random) -> Change:
    """A key is not there, so that the class's default holds."""
    key = rng.choice(tuple(FIELDS))
    return f"no {key}", lambda path: edit_json(path / "config.json", key)


def _tensors(rng: random.Random) -> Change:
    kind = rng.choice(("own head", "equal head", "no head", "head alone", "layer more", "bias", "longer head"))

    def apply(path: Path) -> None:
        file = path / "model.safetensors"
        weights = load_file(file)
        embeddings = weights[EMBEDDINGS] if EMBEDDINGS in weights else weights[HEAD]  # after "head alone"
        generator = torch.Generator().manual_seed(5)
        if kind == "own head":
            weights[HEAD] = 0.1 * torch.randn(embeddings.shape, generator=generator)
        elif kind == "equal head":
            weights[HEAD] = embeddings.clone()
        elif kind == "no head":
            weights.pop(HEAD, None)
        elif kind == "head alone":
            weights[HEAD] = weights.pop(EMBEDDINGS, embeddings)
        elif kind == "longer head":
            weights[HEAD] = 0.1 * torch.randn(len(embeddings) + 8, embeddings.shape[1], generator=generator)
        elif kind == "bias":
            weights["model.layers.0.self_attn.o_proj.bias"] = torch.ones(embeddings.shape[1])
        else:
            weights["model.layers.2.input_layernorm.weight"] = torch.ones(embeddings.shape[1])
        save_file(weights, file, metadata={"format": "pt"})

    return kind, apply


TURNS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATES = (
    TURNS,
    "{{ tools | tojson }}" + TURNS,
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}" + TURNS,
    "{{ messages | tojson(4) }}{{ pad_token is defined }}{{ image_token }}",
    "{% if add_generation_prompt is defined %}{{ add_generation_prompt }}{% endif %}" + TURNS,
    "{{ raise_exception('no') }}",
    "{% if %}",
    "",
)
TOKEN = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TOKENS = ("<s>", "</s>", None, "t300", TOKEN, {"__type": "AddedToken", **TOKEN})
NAMES = ("bos_token", "eos_token", "pad_token", "image_token")
PLACES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/default.jinja")


def text_change(rng: random.Random) -> Change:
    """One change to a checkpoint's templates and special tokens."""
    return rng.choice((_template_file, _named, _token, _token, _map, _decoder))(rng)


def _template_file(rng: random.Random) -> Change:
    place, source = rng.choice(PLACES), rng.choice(TEMPLATES)

    def apply(path: Path) -> None:
        (path / place).parent.mkdir(exist_ok=True)
        (path / place).write_text(source)

    return f"{place}: {source[:30]}", apply


def _named(rng: random.Random) -> Change:
    names = rng.sample(("default", "tool_use", "rag", "default"), rng.randrange(4))
    listed: Any = [{"name": name, "template": rng.choice(TEMPLATES)} for name in names]
    value = rng.choice((listed, listed, {each["name"]: each["template"] for each in listed}, rng.choice(TEMPLATES), 5))
    return f"chat_template = {str(value)[:80]}", lambda path: edit_json(
        path / "tokenizer_config.json", "chat_template", value
    )


def _token(rng: random.Random) -> Change:
    name, value = rng.choice(NAMES), rng.choice(TOKENS)
    return f"{name} = {value}", lambda path: edit_json(path / "tokenizer_config.json", name, value)


def _map(rng: random.Random) -> Change:
    content = {rng.choice(NAMES): rng.choice(TOKENS) for _ in range(2)}
    if rng.random() < 0.3:
        content["extra_special_tokens"] = {"image_token": "t301"}
    return f"map {content}", lambda path: (path / "special_tokens_map.json").write_text(json.dumps(content)) and None


def _decoder(rng: random.Random) -> Change:
    value = {"1": {**TOKEN, "content": "<s>", "special": True}}
    return "added_tokens_decoder", lambda path: edit_json(path / "tokenizer_config.json", "added_tokens_decoder", value)
