"""compressed-tensors checkpoints: FP8 and int8 weights as they are, integers of 4 and 8 bits in words along the inputs.

``float-quantized`` and ``int-quantized`` keep ``weight`` [N, K] in 8 bits with ``weight_scale``: [N, 1], [N, groups],
[1] or, in blocks, [N / rows, K / columns]. ``pack-quantized`` has ``weight_packed`` int32 [N, K * bits / 32],
``weight_shape`` [2] and, where it is not symmetric, ``weight_zero_point`` int32 [N * bits / 32, groups], both plus half
of their range; ``weight_g_idx`` [K] is the group of each input where these are out of order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvforge.checkpoint.formats.settings import group_sizes_of, is_size, refuse
from kvforge.checkpoint.formats.stored_weight import Tensors, WeightFormat, float_scales, matrix, part, unpack_rows
from kvforge.common.errors import CheckpointError

_DENSE = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_SUPPORTED = "float-quantized, int-quantized and pack-quantized"
_DENSE_DTYPES = ("F8_E4M3", "I8")


@dataclass(frozen=True)
class CompressedTensors(WeightFormat):
    """``widths`` are the bits that weights may have, ``block`` the rows and columns of a scale where some are scaled in
    blocks, and all weights that are ``asymmetric`` have zero points."""

    widths: tuple[int, ...] = (4, 8)
    asymmetric: bool = False
    block: tuple[int, int] | None = None
    name = "compressed-tensors"
    scale: ClassVar[str] = "weight_scale"

    def holds(self, tensors: Tensors, name: str) -> bool:
        if part(name, "weight_packed") in tensors.file_of_tensor:
            return True
        return part(name, self.scale) in tensors.file_of_tensor and name in tensors.file_of_tensor

    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]:
        if not self._is_packed(tensors, name):
            shape, dtype = tensors.layout(name)
            if len(shape) != 2 or dtype not in _DENSE_DTYPES:
                raise CheckpointError(
                    f"Tensor {name} in {tensors.path} has a scale and must be a matrix of "
                    f"{' or '.join(_DENSE_DTYPES)}, not {dtype} of shape {list(shape)}; export the checkpoint again."
                )
            return shape
        outputs, words = matrix(tensors, part(name, "weight_packed"), "I32")
        is_pair = tensors.layout(part(name, "weight_shape")) in (((2,), "I32"), ((2,), "I64"))
        sizes = tensors.read_raw(part(name, "weight_shape")).tolist() if is_pair else []
        if not is_pair or sizes[0] != outputs or not 0 < sizes[1] <= words * 8:
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
        scales = float_scales(tensors, part(name, self.scale), (0, 1, 2))
        if scales.dim() != 2:
            scales = scales.view(-1, 1)
        block = self._block(tensors, name)
        return scales if block is None else scales.repeat_interleave(block[0], 0)[: self.shape(tensors, name)[0]]

    def group_depth(self, tensors: Tensors, name: str) -> int:
        block = self._block(tensors, name)
        return super().group_depth(tensors, name) if block is None else block[1]

    def zeros(self, tensors: Tensors, name: str) -> Tensor | None:
        offsets, is_packed = part(name, "weight_zero_point"), self._is_packed(tensors, name)
        if self.asymmetric:
            tensors.layout(offsets)
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
        for bits in self.widths:
            if words == -(-depth * bits // 32):
                return bits
        raise CheckpointError(
            f"{part(name, 'weight_packed')} in {tensors.path} has not {' or '.join(map(str, self.widths))} bits a "
            "weight, as its config.json says; download the checkpoint again."
        )

    def groups(self, tensors: Tensors, name: str) -> Tensor | None:
        index = part(name, "weight_g_idx")
        if index not in tensors.file_of_tensor:
            return self.groups_in(tensors, name, index)
        is_unused = bool((tensors.read_raw(index) < 0).all())  # where the order is that of the inputs
        return None if is_unused else self.groups_in(tensors, name, index)

    def _block(self, tensors: Tensors, name: str) -> tuple[int, int] | None:
        """The rows and columns of each scale of a weight that is scaled in blocks; others may stand beside it."""
        if self.block is None or self._is_packed(tensors, name):
            return None
        found = tensors.layout(part(name, self.scale))[0]
        sizes = zip(self.shape(tensors, name), self.block, strict=True)
        return self.block if found == tuple(-(-size // of_block) for size, of_block in sizes) else None

    def _is_packed(self, tensors: Tensors, name: str) -> bool:
        return part(name, "weight_packed") in tensors.file_of_tensor


@dataclass(frozen=True)
class CacheAlone(CompressedTensors):
    """Plain weights; ``kv_cache_scheme`` is all that is said."""

    has_weights = False


def read_format(where: str, settings: Mapping[str, Any]) -> WeightFormat:
    """Return the format that ``settings`` describe; raises CheckpointError for one that is not supported."""
    for key in ("transform_config", "sparsity_config"):
        found = settings.get(key)
        is_dense = isinstance(found, Mapping) and found.get("format") == "dense"
        if found and not is_dense:
            refuse(where, key, found, "checkpoints without it")
    groups = settings.get("config_groups")
    if groups == {} and settings.get("kv_cache_scheme") is not None:
        return CacheAlone()
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
            if not is_pair or not all(map(is_size, structure)):
                refuse(where, "block_structure", structure, "two numbers")
            blocks.add((structure[0], structure[1]))
    if len(blocks) > 1:
        refuse(where, "block_structure", sorted(blocks), "blocks of one size")
    of_groups = [group["weights"] for group in groups.values()]
    sizes = group_sizes_of(where, *(weights.get("group_size") for weights in of_groups))
    is_ordered = all(weights.get("actorder") in ("group", "dynamic") for weights in of_groups)
    is_asymmetric = all(weights.get("symmetric") is False for weights in of_groups)
    widths = tuple(sorted({weights["num_bits"] for weights in of_groups}))
    return CompressedTensors(sizes, is_ordered, widths, is_asymmetric, blocks.pop() if blocks else None)
