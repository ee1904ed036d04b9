"""Hugging Face checkpoints from trained weights, and back."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from kvforge.training.model import LanguageModel, ModelConfig
from kvforge.training.tokenizer import BOS_ID, EOS_ID, save_tokenizer


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json: Llama, or llama_swiftkv with the cut and the group size when there is a cut."""
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }
    if config.cut < config.num_layers:
        values |= {
            "architectures": ["LlamaSwiftKVForCausalLM"],
            "model_type": "llama_swiftkv",
            "swiftkv": True,
            "num_key_value_layers": config.cut,
            "key_value_group_size": config.group_size,
        }
    return values


def model_config(values: dict[str, Any]) -> ModelConfig:
    """The inverse of `hf_config`."""
    num_layers = values["num_hidden_layers"]
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=num_layers,
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        rope_theta=values["rope_theta"],
        norm_eps=values["rms_norm_eps"],
        max_position=values["max_position_embeddings"],
        cut=values.get("num_key_value_layers", num_layers),
        group_size=values.get("key_value_group_size", 1),
    )


def export_checkpoint(model: LanguageModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes config.json, model.safetensors (bf16, tied head not stored) and the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(model.config), indent=2) + "\n")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, directory, model.config.max_position)


def load_checkpoint(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[LanguageModel, Tokenizer]:
    """The model, in evaluation mode, and the tokenizer of a directory written by `export_checkpoint`."""
    model = LanguageModel(model_config(json.loads((directory / "config.json").read_text())))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.to(dtype).eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))
