"""Streaming a checkpoint's tensors into the engine's one weights file."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from model_defs import ModelConfig
from model_defs.weights import WeightSpec, weight_specs

FREQUENCIES = "inverse_frequencies"


def convert_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    path: Path,
    progress: Callable[[int], object] = lambda _: None,
) -> int:
    """Write every tensor of the graphs in ``dtype`` to ``path``; returns the number of parameters.

    One fused tensor is in memory at a time. The RoPE frequencies are stored beside the weights, in fp32.
    ``progress`` is called with the bytes of each tensor as it is read.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """
    weights = {spec.name: spec for spec in weight_specs(config)}
    frequencies = config.rope.inverse_frequencies(config.head_dim)
    specs = [TensorSpec(spec.name, spec.shape, dtype) for spec in weights.values()]
    specs.append(TensorSpec(FREQUENCIES, tuple(frequencies.shape), torch.float32))

    def produce(spec: TensorSpec) -> Tensor:
        progress(spec.num_bytes)
        return frequencies if spec.name == FREQUENCIES else _fuse(checkpoint, weights[spec.name], dtype)

    write_safetensors(path, specs, produce)
    return sum(torch.Size(spec.shape).numel() for spec in weights.values())


def _fuse(checkpoint: Checkpoint, spec: WeightSpec, dtype: torch.dtype) -> Tensor:
    parts = [checkpoint.read(source.name, source.shape).to(dtype) for source in spec.sources]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
