"""FP8 checkpoints as makers of models publish them: ``weight`` [N, K] in e4m3, to be multiplied with
``weight_scale_inv``, which is [N / rows, K / columns] for blocks of ``weight_block_size``, or one number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvforge.checkpoint.formats.compressed_tensors import CompressedTensors
from kvforge.checkpoint.formats.settings import is_size, refuse
from kvforge.checkpoint.formats.stored_weight import WeightFormat

_SUPPORTED = {"fmt": ("e4m3",), "expert_dtype": ("fp8",), "activation_scheme": ("dynamic", "static")}


@dataclass(frozen=True)
class Fp8(CompressedTensors):
    """As ``float-quantized`` weights, but for the name of the scales."""

    name = "fp8"
    scale = "weight_scale_inv"


def read_format(where: str, settings: Mapping[str, Any]) -> WeightFormat:
    """Return the format that ``settings`` describe; raises CheckpointError for one that is not supported."""
    for key, supported in _SUPPORTED.items():
        if settings.get(key) not in (None, *supported):
            refuse(where, key, settings[key], " and ".join(supported))
    size = settings.get("weight_block_size", [128, 128])
    if size is not None and (not isinstance(size, list) or len(size) != 2 or not all(map(is_size, size))):
        refuse(where, "weight_block_size", size, "null and two numbers above 0")
    return Fp8(block=None if size is None else (size[0], size[1]))
