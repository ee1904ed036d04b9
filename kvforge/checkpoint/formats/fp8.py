"""FP8 checkpoints as the makers of models publish them: ``weight`` [N, K] in e4m3, to be multiplied with
``weight_scale_inv``, which is [N / rows, K / columns] for blocks of ``weight_block_size``, or one number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvforge.checkpoint.formats.settings import is_size, refuse
from kvforge.checkpoint.formats.stored_weight import Tensors, WeightFormat, float_scales, matrix, part

_FIXED = {"fmt": ("e4m3",), "expert_dtype": ("fp8",), "activation_scheme": ("dynamic", "static")}


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """``block`` has the rows and columns of a scale; None where each is a weight's."""

    block: tuple[int, int] | None = None
    name = "fp8"

    def holds(self, tensors: Tensors, name: str) -> bool:
        return part(name, "weight_scale_inv") in tensors.file_of_tensor and name in tensors.file_of_tensor

    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]:
        return matrix(tensors, name, "F8_E4M3")

    def values(self, tensors: Tensors, name: str) -> Tensor:
        return tensors.read_raw(name, finite=False)

    def scales(self, tensors: Tensors, name: str) -> Tensor:
        stored = float_scales(tensors, part(name, "weight_scale_inv"), (0, 1, 2))
        if self.block is None or stored.numel() == 1:
            return stored.view(1, 1) if stored.numel() == 1 else self._refuse(tensors, name)
        (outputs, depth), (rows, columns) = self.shape(tensors, name), self.block
        if stored.shape != (-(-outputs // rows), -(-depth // columns)):
            self._refuse(tensors, name)
        return stored.repeat_interleave(rows, 0)[:outputs]

    def zeros(self, tensors: Tensors, name: str) -> Tensor | None:
        return None

    def bits(self, tensors: Tensors, name: str) -> int:
        return 8

    def group_depth(self, tensors: Tensors, name: str) -> int:
        depth = self.shape(tensors, name)[1]
        return depth if self.num_groups(tensors, name) == 1 or self.block is None else self.block[1]


def read_format(where: str, settings: Mapping[str, Any]) -> WeightFormat:
    """Return the format that ``settings`` describe; raises CheckpointError for one that is not supported."""
    for key, supported in _FIXED.items():
        if settings.get(key) not in (None, *supported):
            refuse(where, key, settings[key], " and ".join(supported))
    size = settings.get("weight_block_size", (128, 128))
    if size is None:
        return Fp8()
    if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(map(is_size, size)):
        refuse(where, "weight_block_size", size, "null and two numbers above 0")
    return Fp8(block=(size[0], size[1]))
