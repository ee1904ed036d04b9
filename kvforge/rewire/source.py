"""The checkpoint that is rewired: plain, whole and not quantized."""

from dataclasses import dataclass
from pathlib import Path

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.model import (
    check_is_not_blind,
    check_is_rewired,
    check_weights,
    open_model,
    read_model_config,
)
from kvforge.checkpoint.safetensors_writer import DTYPES, TensorSpec
from kvforge.common.errors import CheckpointError
from model_defs import ModelConfig


@dataclass(frozen=True)
class PlainCheckpoint:
    """An opened checkpoint without a cut, and what every tensor of it is."""

    checkpoint: Checkpoint
    config: ModelConfig
    specs: dict[str, TensorSpec]


def open_source(path: str | Path) -> PlainCheckpoint:
    """Open a checkpoint of any family.

    Raises:
        CheckpointError: it cannot be read, is not supported, is quantized, has a cut already, or lacks a tensor.
    """
    checkpoint = open_model(path)
    if checkpoint.quantization is not None:
        raise CheckpointError(f"{path} is quantized ({checkpoint.quantization}); rewire the original.")
    config = read_model_config(checkpoint)
    check_is_rewired(checkpoint)
    check_is_not_blind(checkpoint)
    if config.is_swiftkv or any("_swiftkv." in name or "_early_exit." in name for name in checkpoint.file_of_tensor):
        raise CheckpointError(f"{path} is a SwiftKV checkpoint already; rewire the model it was made from.")
    check_weights(checkpoint, config)
    return PlainCheckpoint(checkpoint, config, _read_specs(checkpoint))


def _read_specs(checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    specs = {}
    for name, file in checkpoint.file_of_tensor.items():
        shape, dtype = checkpoint.layout(name)
        if dtype not in DTYPES:
            raise CheckpointError(f"Tensor {name} in {file} has dtype {dtype}, which cannot be copied.")
        specs[name] = TensorSpec(name, shape, DTYPES[dtype])
    return specs
