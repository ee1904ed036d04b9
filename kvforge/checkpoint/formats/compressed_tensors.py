"""compressed-tensors checkpoints: FP8 and int8 weights as they are, integers of 4 and 8 bits in words along the inputs.

``float-quantized`` and ``int-quantized`` keep ``weight`` [N, K] in 8 bits with ``weight_scale``: [N, 1], [N, groups],
[1] or, in blocks, [N / rows, K / columns]. ``pack-quantized`` has ``weight_packed`` int32 [N, K * bits / 32],
``weight_shape`` [2] and, where it is not symmetric, ``weight_zero_point`` int32 [N * bits / 32, groups], both plus half
of their range; ``weight_g_idx`` [K] is the group of each input where these are out of order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvforge.checkpoint.formats.settings import refuse
from kvforge.checkpoint.formats.stored_weight import Tensors, WeightFormat, matrix, part, unpack_rows
from kvforge.common.errors import CheckpointError

_DENSE = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_SUPPORTED = "float-quantized, int-quantized and pack-quantized"
_DENSE_DTYPES = ("F8_E4M3", "I8")


@dataclass(frozen=True)
class CompressedTensors(WeightFormat):
    """``block`` has the rows and columns of a scale where weights are scaled in blocks."""

    block: tuple[int, int] | None = None
    name = "compressed-tensors"

    def holds(self, tensors: Tensors, name: str) -> bool:
        if part(name, "weight_packed") in tensors.file_of_tensor:
            return True
        return part(name, "weight_scale") in tensors.file_of_tensor and name in tensors.file_of_tensor

    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]:
        if not self._is_packed(tensors, name):
            shape, dtype = tensors.layout(name)
            if len(shape) != 2 or dtype not in _DENSE_DTYPES:
                raise CheckpointError(
                    f"Tensor {name} in {tensors.path} has a scale and must be a matrix of "
                    f"{' or '.join(_DENSE_DTYPES)}, not {dtype} of shape {list(shape)}; export the checkpoint again."
                )
            return shape
        sizes = tensors.read_raw(part(name, "weight_shape")).flatten().tolist()
        outputs, words = matrix(tensors, part(name, "weight_packed"), "I32")
        if len(sizes) != 2 or sizes[0] != outputs or not 0 < sizes[1] <= words * 8:
            raise CheckpointError(
                f"{part(name, 'weight_shape')} in {tensors.path} says {sizes}, which {part(name, 'weight_packed')} of "
                f"shape {[outputs, words]} cannot hold; download the checkpoint again."
            )
        return int(sizes[0]), int(sizes[1])

    def values(self, tensors: Tensors, name: str) -> Tensor:
        if not self._is_packed(tensors, name):
            return tensors.read_raw(name, finite=False)
        words = tensors.read_raw(part(name, "weight_packed"))
        return unpack_rows(words, self.bits(tensors, name))[:, : self.shape(tensors, name)[1]]

    def scales(self, tensors: Tensors, name: str) -> Tensor:
        scales = tensors.read_raw(part(name, "weight_scale"), finite=False).float()
        if scales.dim() != 2:
            scales = scales.view(-1, 1)
        if self.block is None or self._is_packed(tensors, name):
            return scales
        return scales.repeat_interleave(self.block[0], 0)[: self.shape(tensors, name)[0]]

    def group_depth(self, tensors: Tensors, name: str) -> int:
        if self.block is not None and not self._is_packed(tensors, name):
            return self.block[1]
        return super().group_depth(tensors, name)

    def zeros(self, tensors: Tensors, name: str) -> Tensor | None:
        offsets, is_packed = part(name, "weight_zero_point"), self._is_packed(tensors, name)
        if offsets not in tensors.file_of_tensor:
            middle = 1 << (self.bits(tensors, name) - 1)
            return torch.full_like(self.scales(tensors, name), middle, dtype=torch.int32) if is_packed else None
        if not is_packed:
            return tensors.read_raw(offsets).float().view(self.scales(tensors, name).shape)
        matrix(tensors, offsets, "I32")
        stored = unpack_rows(tensors.read_raw(offsets).T, self.bits(tensors, name))
        return stored.T[: self.shape(tensors, name)[0]]

    def bits(self, tensors: Tensors, name: str) -> int:
        if not self._is_packed(tensors, name):
            return 8
        depth = self.shape(tensors, name)[1]
        words = matrix(tensors, part(name, "weight_packed"), "I32")[1]
        for bits in (4, 8):
            if words == -(-depth * bits // 32):
                return bits
        raise CheckpointError(
            f"{part(name, 'weight_packed')} in {tensors.path} has neither 4 nor 8 bits a weight; use a checkpoint with "
            "these, or the unquantized one."
        )

    def groups(self, tensors: Tensors, name: str) -> Tensor | None:
        index = part(name, "weight_g_idx")
        if index not in tensors.file_of_tensor:
            return None
        found = tensors.read_raw(index).long()
        is_unused = bool((found < 0).all())  # where the order is that of the inputs
        group_depth = -(-len(found) // self.num_groups(tensors, name))
        is_regular = torch.equal(found, torch.arange(len(found)) // group_depth)
        return None if is_unused or is_regular else found

    def _is_packed(self, tensors: Tensors, name: str) -> bool:
        return part(name, "weight_packed") in tensors.file_of_tensor


def read_format(where: str, settings: Mapping[str, Any]) -> WeightFormat:
    """Return the format that ``settings`` describe; raises CheckpointError for one that is not supported."""
    for key in ("transform_config", "sparsity_config"):
        found = settings.get(key)
        is_dense = isinstance(found, Mapping) and found.get("format") == "dense"
        if found and not is_dense:
            refuse(where, key, found, "checkpoints without it")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        refuse(where, "config_groups", groups, "groups as compressed-tensors writes them")
    blocks: set[tuple[int, int]] = set()
    for group in groups.values():
        found = group.get("format") or settings.get("format")
        if found not in (*_DENSE, _PACKED):
            refuse(where, "format", found, _SUPPORTED)
        weights = group.get("weights")
        if not isinstance(weights, Mapping) or weights.get("num_bits") not in (4, 8):
            refuse(where, "weights", weights, "weights of 4 and 8 bits")
        structure = weights.get("block_structure")
        if structure:
            is_pair = isinstance(structure, list) and len(structure) == 2
            if not is_pair or not all(isinstance(size, int) and size > 0 for size in structure):
                refuse(where, "block_structure", structure, "two numbers")
            blocks.add((structure[0], structure[1]))
    if len(blocks) > 1:
        refuse(where, "block_structure", sorted(blocks), "blocks of one size")
    return CompressedTensors(blocks.pop() if blocks else None)
