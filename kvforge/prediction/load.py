"""Base models and predictors from checkpoints, as differentiable modules."""

from pathlib import Path

import torch

from kvforge.checkpoint.predictor import open_predictor
from kvforge.prediction.predictor import KVPredictor
from kvforge.rewire.source import PlainCheckpoint, open_source
from kvforge.swiftkv import SwiftKVForCausalLM, load_model, load_weights
from model_defs import ModelConfig


def load_base(source: PlainCheckpoint, dtype: torch.dtype) -> SwiftKVForCausalLM:
    """Return the base model, frozen."""
    return load_model(source.checkpoint, source.config, dtype).requires_grad_(False)


def load_predictor(path: str | Path, base: ModelConfig, dtype: torch.dtype) -> KVPredictor:
    """Return the predictor of a checkpoint for ``base``; raises CheckpointError as ``open_predictor`` does."""
    checkpoint, prediction = open_predictor(path, base)
    with torch.device("meta"):
        predictor = KVPredictor(prediction)
    load_weights(predictor, checkpoint, dtype)
    return predictor.eval()


def load_pair(base: str | Path, predictor: str | Path, dtype: torch.dtype) -> tuple[SwiftKVForCausalLM, KVPredictor]:
    """Return a base model and its predictor from their checkpoints."""
    source = open_source(base)
    return load_base(source, dtype), load_predictor(predictor, source.config, dtype)
