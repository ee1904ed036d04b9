"""Writing a checkpoint's weights as Hugging Face does: one file, or shards with an index."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from kvforge.checkpoint.safetensors_writer import TensorSpec, write_safetensors

_METADATA = {"format": "pt"}


def write_sharded(
    directory: Path, specs: Sequence[TensorSpec], produce: Callable[[TensorSpec], Tensor], max_shard_bytes: int
) -> int:
    """Write ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` … and ``model.safetensors.index.json``.

    Tensors keep the order of ``specs`` across shards; one larger than ``max_shard_bytes`` has a shard of its own. One
    tensor is in memory at a time. Returns the bytes of all tensors.
    """
    shards = _split(specs, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(directory / "model.safetensors", specs, produce, _METADATA)
        return _size(specs)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / name, shard, produce, _METADATA)
        weight_map |= {spec.name: name for spec in shard}
    index = {"metadata": {"total_size": _size(specs)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return _size(specs)


def _split(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if shards[-1] and _size(shards[-1]) + spec.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(spec)
    return shards


def _size(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)
