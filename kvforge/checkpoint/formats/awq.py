"""AWQ checkpoints, as AutoAWQ's GEMM kernels read them: words of 8 outputs, interleaved.

``qweight`` int32 [K, N / 8], ``scales`` [groups, N], ``qzeros`` int32 [groups, N / 8].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvforge.checkpoint.formats.settings import bits_of, group_sizes_of, refuse
from kvforge.checkpoint.formats.stored_weight import Tensors, WeightFormat, float_scales, matrix, part, unpack_rows

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of each of 8 outputs, which of the numbers of a word, lowest first, is its."""


@dataclass(frozen=True)
class Awq(WeightFormat):
    """AWQ with 4 bits."""

    name = "AWQ"

    def holds(self, tensors: Tensors, name: str) -> bool:
        return part(name, "qweight") in tensors.file_of_tensor

    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]:
        depth, words = matrix(tensors, part(name, "qweight"), "I32")
        return words * 8, depth

    def values(self, tensors: Tensors, name: str) -> Tensor:
        return _outputs(tensors.read_raw(part(name, "qweight"))).T

    def scales(self, tensors: Tensors, name: str) -> Tensor:
        return float_scales(tensors, part(name, "scales")).mT

    def zeros(self, tensors: Tensors, name: str) -> Tensor | None:
        matrix(tensors, part(name, "qzeros"), "I32")
        return _outputs(tensors.read_raw(part(name, "qzeros"))).T

    def bits(self, tensors: Tensors, name: str) -> int:
        return 4


def _outputs(words: Tensor) -> Tensor:
    """The numbers of words ``[R, C]`` in the order of the outputs: uint8 ``[R, 8 * C]``."""
    numbers = unpack_rows(words, 4)
    return numbers.view(len(words), words.shape[1], 8)[..., list(_PLACES)].reshape(numbers.shape)


def read_format(where: str, settings: Mapping[str, Any]) -> WeightFormat:
    """Return the format that ``settings`` describe; raises CheckpointError for one that is not supported."""
    bits_of(where, settings, (4,))
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        refuse(where, "version", version, "gemm")
    if settings.get("zero_point") is False:
        refuse(where, "zero_point", False, "checkpoints with zero points")
    sizes = [settings[key] for key in ("group_size", "q_group_size") if key in settings]
    return Awq(group_sizes_of(where, *sizes[:1]))
