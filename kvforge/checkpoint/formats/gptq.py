"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them: words of 4 or 8 bits along the inputs, transposed.

``qweight`` int32 [K * bits / 32, N], ``scales`` [groups, N], ``qzeros`` int32 [groups, N * bits / 32], which the first
version of the format stores less 1, and ``g_idx`` int32 [K], the group of each input.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvforge.checkpoint.formats.settings import bits_of, group_sizes_of, refuse
from kvforge.checkpoint.formats.stored_weight import Tensors, WeightFormat, float_scales, matrix, part, unpack_rows


@dataclass(frozen=True)
class Gptq(WeightFormat):
    """``offset`` is what is added to stored zero points."""

    num_bits: int = 4
    offset: int = 1
    name = "GPTQ"

    def holds(self, tensors: Tensors, name: str) -> bool:
        return part(name, "qweight") in tensors.file_of_tensor

    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]:
        words, outputs = matrix(tensors, part(name, "qweight"), "I32")
        return outputs, words * 32 // self.num_bits

    def values(self, tensors: Tensors, name: str) -> Tensor:
        return unpack_rows(tensors.read_raw(part(name, "qweight")).T, self.num_bits)

    def scales(self, tensors: Tensors, name: str) -> Tensor:
        return float_scales(tensors, part(name, "scales")).mT

    def zeros(self, tensors: Tensors, name: str) -> Tensor | None:
        matrix(tensors, part(name, "qzeros"), "I32")
        stored = unpack_rows(tensors.read_raw(part(name, "qzeros")), self.num_bits)
        return stored.T.to(torch.int32) + self.offset

    def bits(self, tensors: Tensors, name: str) -> int:
        return self.num_bits

    def groups(self, tensors: Tensors, name: str) -> Tensor | None:
        return self.groups_in(tensors, name, part(name, "g_idx"))


def read_format(where: str, settings: Mapping[str, Any]) -> WeightFormat:
    """Return the format that ``settings`` describe; raises CheckpointError for one that is not supported."""
    bits = bits_of(where, settings, (4, 8))
    version = settings.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        refuse(where, "checkpoint_format", version, "gptq and gptq_v2")
    dynamic = settings.get("dynamic") or {}  # of single modules, by regular expressions
    if not isinstance(dynamic, Mapping) or not all(isinstance(one, Mapping) for one in dynamic.values()):
        refuse(where, "dynamic", dynamic, "settings of modules as GPTQModel writes them")
    said = [one["group_size"] for one in (settings, *dynamic.values()) if "group_size" in one]
    sizes = group_sizes_of(where, *said)
    return Gptq(sizes, bool(settings.get("desc_act")), bits, 1 if version == "gptq" else 0)
