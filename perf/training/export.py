"""Hugging Face checkpoints from trained weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from perf.training.tokenizer import save_tokenizer


def export_checkpoint(
    weights: Mapping[str, Tensor], hf_config: Mapping[str, Any], tokenizer: Tokenizer, directory: Path
) -> None:
    """Writes config.json, model.safetensors (bf16, tied head not stored) and the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, directory, hf_config["max_position_embeddings"])
