"""Packed weights of experts: those of PackedLinear, one expert's after the other."""

import torch
from torch import Tensor

from plugins.packed_linear.packing import pack


def pack_experts(weight: Tensor, weight_dtype: torch.dtype, gated: bool = False) -> tuple[Tensor, Tensor | None]:
    """Pack the weights `[E, N, K]` of E experts as `plugins.packed_linear.pack` does each; returns both stacked."""
    packed, scales = zip(*(pack(one, weight_dtype, gated) for one in weight), strict=True)
    return torch.stack(packed), None if scales[0] is None else torch.stack(scales)
