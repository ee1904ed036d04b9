"""The formats of other libraries' quantized checkpoints: a file each, found by ``quant_method`` of config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from kvforge.checkpoint.formats import awq, compressed_tensors, fp8, gptq
from kvforge.checkpoint.formats.stored_weight import Tensors, WeightFormat

__all__ = ["FORMATS", "Tensors", "WeightFormat"]

FORMATS: Mapping[str, Callable[[str, Mapping[str, Any]], WeightFormat]] = {
    "awq": awq.read_format,
    "compressed-tensors": compressed_tensors.read_format,
    "fp8": fp8.read_format,
    "gptq": gptq.read_format,
}
"""What makes a format of (where it is said, ``quantization_config``); CheckpointError where it is not supported."""
