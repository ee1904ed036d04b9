"""Models from checkpoints."""

import torch
from torch import nn

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.model import check_is_rewired
from kvforge.swiftkv.model import SwiftKVForCausalLM
from model_defs import ModelConfig


def load_weights(module: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype, prefix: str = "") -> None:
    """Give every parameter of ``module``, made on the meta device, its tensor ``prefix + name`` in ``dtype``.

    Raises:
        CheckpointError: a tensor is missing, misshapen or not finite in ``dtype``.
    """
    weights = {
        name: checkpoint.read(prefix + name, tuple(tensor.shape), dtype) for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(weights, assign=True)


def load_model(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, *, with_teacher: bool = False
) -> SwiftKVForCausalLM:
    """Return the model of a checkpoint in ``dtype``, with its early-exit head if it has one.

    Raises:
        CheckpointError: a tensor is missing, misshapen or not finite in ``dtype``, or the family has no such model; of
            a rewired checkpoint, ``with_teacher`` needs the q, k and v projections that its layers had before.
    """
    check_is_rewired(checkpoint)
    with torch.device("meta"):
        model = SwiftKVForCausalLM(config, with_teacher=with_teacher)
    load_weights(model, checkpoint, dtype)
    return model.eval()
