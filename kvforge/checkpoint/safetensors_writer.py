"""Writing a safetensors file tensor by tensor, so that a checkpoint larger than memory can be converted."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Safetensors' names of dtypes."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    path: Path,
    specs: Sequence[TensorSpec],
    produce: Callable[[TensorSpec], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write ``path``; ``produce(spec)`` is called once per tensor and its result dropped after writing. Returns the
    file's SHA-256 as hexadecimal text, which a thread computes of each tensor while it is written.

    ``metadata`` goes into the header; transformers looks for ``{"format": "pt"}`` there. Data starts at a multiple of
    64 bytes, and tensors whose size is one come first, so that these are aligned for vector loads when the file is
    memory-mapped.

    Raises:
        ValueError: a produced tensor does not have its spec's shape or dtype.
    """
    ordered = sorted(specs, key=lambda spec: spec.num_bytes % _ALIGNMENT != 0)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in ordered:
        header[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.num_bytes],
        }
        offset += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    begin = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(begin)
    with path.open("wb") as file, ThreadPoolExecutor(max_workers=1) as pool:
        file.write(begin)
        for spec in ordered:
            data = _bytes_of(produce(spec), spec)
            hashing = pool.submit(digest.update, data)
            file.write(data)
            hashing.result()
    return digest.hexdigest()


def _bytes_of(tensor: Tensor, spec: TensorSpec) -> memoryview:
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise ValueError(f"{spec.name}: expected {spec.dtype} {spec.shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
