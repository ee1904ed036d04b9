"""The static scales of an 8-bit KV cache that an export of ModelOpt or compressed-tensors carries, per owner."""

import math
from typing import Protocol

import torch

from kvforge.checkpoint.reader import Checkpoint
from kvforge.common.errors import CheckpointError

QMAX = {"FP8": 448.0, "INT8": 127.0, "fp8_static": 448.0, "int8_static": 127.0}
"""Largest stored value by ModelOpt's algorithm and by kvforge's KV dtype."""

_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_ENDINGS = ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")


class OwnerTable(Protocol):
    """What is needed of a model's configuration: the layers with a cache, and SwiftKV's cut."""

    @property
    def owners(self) -> tuple[int, ...]: ...

    @property
    def cut(self) -> int: ...


def scale_names(owner: int, cut: int, of_modelopt: bool = True) -> tuple[str, str]:
    """Return the names of the tensors that hold an owner's K and V scale: ModelOpt's, or else compressed-tensors'."""
    if not of_modelopt:
        return f"model.layers.{owner}.self_attn.k_scale", f"model.layers.{owner}.self_attn.v_scale"
    suffix = "_swiftkv" if owner >= cut else ""
    prefix = f"model.layers.{owner}.self_attn"
    return f"{prefix}.k_proj{suffix}.k_scale", f"{prefix}.v_proj{suffix}.v_scale"


def kv_scales(
    checkpoint: Checkpoint, config: OwnerTable, kv_dtype: str = "fp8_static"
) -> tuple[tuple[float, float], ...]:
    """Return (k_scale, v_scale) per owner of ``config.owners``; () where the export has no quantized cache.

    A scale is ModelOpt's amax / 448 (fp8) or amax / 127 (int8) of the rotated K and of V: stored = x / scale;
    compressed-tensors divides int8's by 127.5 and saturates at 127. For ``int8_static`` an FP8 export's scales are
    multiplied by 448 / 127, so that the same amax is the largest value. An export of ModelOpt whose algorithm is FP8
    and that has no scale at all was made with its constant amax, scale 1.

    Raises:
        CheckpointError: some scales are missing or under other names, or one is not a positive normal float32, or
            there are zero points, or there are no scales and an INT8 cache is asked for.
    """
    algorithm = checkpoint.quantization.kv_cache_algo if checkpoint.quantization else None
    if checkpoint.quantization is None or algorithm not in QMAX:
        return ()
    of_modelopt = checkpoint.quantization.weight_format is None
    names = [name for owner in config.owners for name in scale_names(owner, config.cut, of_modelopt)]
    offsets = [name for name in checkpoint.file_of_tensor if name.endswith((".k_bias", ".v_bias"))]
    if offsets:
        raise CheckpointError(
            f"{checkpoint.path} has {offsets[0]}: an affine KV cache is not supported; export it with a symmetric one."
        )
    present = [name for name in names if name in checkpoint.file_of_tensor]
    if present and len(present) != len(names):
        missing = next(name for name in names if name not in checkpoint.file_of_tensor)
        raise CheckpointError(
            f"{missing} is missing from {checkpoint.path}, which has {len(present)} of {len(names)} KV scales; "
            "calibrate it again."
        )
    if not present:
        _check_constant(checkpoint, algorithm if of_modelopt else None, kv_dtype)
    ratio = QMAX[algorithm] / QMAX[kv_dtype]
    values = [_scale(checkpoint, name, ratio) if present else 1.0 for name in names]
    return tuple(zip(values[0::2], values[1::2], strict=True))


def _check_constant(checkpoint: Checkpoint, algorithm: str | None, kv_dtype: str) -> None:
    """Raise CheckpointError unless a checkpoint without scales means scale 1; ``algorithm`` is ModelOpt's."""
    other = next((name for name in checkpoint.file_of_tensor if name.endswith(_ENDINGS)), None)
    if other is not None:
        raise CheckpointError(
            f"{checkpoint.path} has {other}, but none of the scales that its library's export would name; make the "
            "export with kvforge quantize, or choose --kv-dtype int8, which needs no calibration."
        )
    if algorithm != "FP8" or kv_dtype != "fp8_static":
        raise CheckpointError(
            f"{checkpoint.path} has no KV scales, which only ModelOpt's FP8 cache can do without; calibrate it, or "
            "choose --kv-dtype int8, which needs no calibration."
        )


def _scale(checkpoint: Checkpoint, name: str, ratio: float) -> float:
    tensor = checkpoint.read_raw(name, finite=False)
    value = float(tensor.float().item()) * ratio if tensor.numel() == 1 else math.nan
    if not _SMALLEST <= value <= _LARGEST:
        raise CheckpointError(
            f"{name} in {checkpoint.path} must be one positive number; calibrate the checkpoint again."
        )
    return value
