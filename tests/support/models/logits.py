"""Logits of a checkpoint on disk: by the plain reference from what the product reads of it, and by transformers."""

from pathlib import Path

import torch
import transformers
from torch import Tensor

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from model_defs import ModelConfig
from model_defs.reference import reference_logits
from model_defs.weights import weight_specs


def read_weights(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Tensor]:
    """All tensors that an engine of ``config`` is made of, in float32."""
    sources = {source.name: source.shape for spec in weight_specs(config) for source in spec.sources}
    return {name: checkpoint.read(name, shape, torch.float32) for name, shape in sources.items()}


def logits_of(path: Path, ids: Tensor) -> tuple[Tensor, ModelConfig]:
    """Logits ``[n, vocab]`` of ``ids`` [n], and the model. Raises CheckpointError where a build does."""
    checkpoint = open_model(path)
    config = read_model_config(checkpoint)
    check_weights(checkpoint, config)
    config = config.for_length(len(ids))
    return reference_logits(config, read_weights(checkpoint, config), ids), config


def transformers_logits(path: Path, ids: Tensor) -> Tensor:
    """The same by transformers, in float32."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = model(ids[None]).logits[0]
    return logits
