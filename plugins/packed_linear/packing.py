"""The layout of packed weights: panels of 64 outputs, in which 4 bytes of a row's depth lie together.

bfloat16 comes in pairs of the depth, `[panels, K/2, 64, 2]`, int8 in quads, `[panels, K/4, 64, 4]`: what one
instruction multiplies with a broadcast word of the activations. N and K are padded with zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from plugins.kv_quantization import dynamic_scale, quantize

PANEL = 64
"""Outputs of a panel. A gated panel holds 32 rows of the gate and then the same 32 rows of up."""

PANELS_AT_ONCE = 8
"""What is packed in one go: its copies stay in the processor's caches, and all its cores work on it."""

GROUP = {torch.bfloat16: 2, torch.int8: 4}
"""Elements of the depth that lie together."""


def pack(weight: Tensor, weight_dtype: torch.dtype, gated: bool = False) -> tuple[Tensor, Tensor | None]:
    """Pack the weight `[N, K]` of a linear layer as bfloat16 or int8 for `plugins.packed_linear`.

    Returns the packed weight and, for int8, the scales: float32 [2, N padded], the scale of each output
    (max|w| / 127) and the sum of its quantized weights, in the order of the panels. With `gated`, the rows are
    [gate; up]. Raises ValueError for another dtype, for a weight that is no matrix and for an odd number of gated
    rows.
    """
    if weight_dtype not in GROUP:
        raise ValueError(f"Weights are packed as torch.bfloat16 or torch.int8, not {weight_dtype}.")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"A weight to pack must be a matrix [N, K], not of shape {list(weight.shape)}.")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"Gated rows are as many gate as up rows, so {weight.shape[0]} cannot be packed.")
    group, width = GROUP[weight_dtype], PANEL // 2 if gated else PANEL
    outputs, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    num_panels, num_groups = -(-outputs // width), -(-depth // group)
    packed = weight.new_empty((num_panels, num_groups, PANEL, group), dtype=weight_dtype)
    is_int8 = weight_dtype == torch.int8
    scales = weight.new_empty((2, num_panels * PANEL), dtype=torch.float32) if is_int8 else None
    if weight.is_meta:
        return packed, scales
    words = packed.view(torch.int32)[..., 0]  # a group is moved as one word
    for first in range(0, num_panels, PANELS_AT_ONCE):
        last = min(first + PANELS_AT_ONCE, num_panels)
        rows = _rows_of_panels(weight, first, last, gated)
        if scales is not None:
            scale = dynamic_scale(rows, torch.int8)
            rows = quantize(rows, scale[:, None], torch.int8)
            scales[0, first * PANEL : last * PANEL] = scale
            scales[1, first * PANEL : last * PANEL] = rows.sum(1, dtype=torch.int64)
        rows = F.pad(rows.to(weight_dtype), (0, -depth % group)).contiguous()
        words[first:last] = rows.view(torch.int32).view(-1, PANEL, num_groups).transpose(1, 2)
    return packed, scales


def _rows_of_panels(weight: Tensor, first: int, last: int, gated: bool) -> Tensor:
    """The rows of panels `[first, last)` in their order, zeros where there are no more."""
    count = (last - first) * PANEL
    if not gated:
        rows = weight[first * PANEL : last * PANEL]
        return F.pad(rows, (0, 0, 0, count - rows.shape[0]))
    half = PANEL // 2
    halves = weight.view(2, -1, weight.shape[1])[:, first * half : last * half]
    halves = F.pad(halves, (0, 0, 0, count // 2 - halves.shape[1]))
    return halves.view(2, -1, half, weight.shape[1]).transpose(0, 1).reshape(count, -1)


def unpack(packed: Tensor, num_outputs: int, depth: int, gated: bool) -> Tensor:
    """The rows `[num_outputs, depth]` of a packed weight, or of scales given as `[panels, 1, 64, 1]`."""
    rows = packed.transpose(1, 2).reshape(packed.shape[0], PANEL, -1)[..., :depth]
    if gated:
        halves = rows.view(-1, 2, PANEL // 2, depth).transpose(0, 1).reshape(2, -1, depth)
        return halves[:, : num_outputs // 2].reshape(num_outputs, depth)
    return rows.reshape(-1, depth)[:num_outputs]
