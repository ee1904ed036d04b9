"""The layout of packed weights: panels of 64 outputs, in which 4 bytes of a row's depth lie together.

bfloat16 comes in pairs of the depth, `[panels, K/2, 64, 2]`, int8 in quads, `[panels, K/4, 64, 4]`: what one
instruction multiplies with a broadcast word of the activations. N and K are padded with zeros.

int4 comes in groups of 32 of the depth, uint8 `[panels, K/32, 1088, 1152 or 1216]`. A group has, for each 8 of its
depth, 64 words of 4 bytes, one for each output: the low half of byte i is the code of i, the high half that of i + 4.
Then come the 64 outputs' steps, a signed byte each (`int4_steps.py`), or their scales as float16 and, where there are
any, their zero points, a byte each (`int4.py`).
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from plugins.kv_quantization import SMALLEST_SCALE, dynamic_scale, quantize
from plugins.kv_rotation import rotate_blocks
from plugins.packed_linear.int4 import GROUP_DEPTH, Codes, factors, half_scales, round_to_codes
from plugins.packed_linear.int4_steps import SteppedCodes, round_in_steps
from plugins.packed_linear.int8 import ByteCodes

PANEL = 64
"""Outputs of a panel. A gated panel holds 32 rows of the gate and then the same 32 rows of up."""

LARGEST_BLOCK = 256
"""Of the depth, rotated together: what an instruction set's registers hold."""

PANELS_AT_ONCE = 8
"""What is packed in one go: its copies stay in the processor's caches, and all its cores work on it."""

GROUP = {torch.bfloat16: 2, torch.int8: 4}
"""Elements of the depth that lie together."""


IN_STEPS, WITH_SCALES, WITH_ZEROS = torch.int4, torch.uint4, torch.quint4x2
"""The dtypes that stand for the kinds of int4 weights: with steps, with scales, with scales and zero points."""

INT4 = (IN_STEPS, WITH_SCALES, WITH_ZEROS)

CHUNK = 8
"""Of int4, the codes of an output that lie in one word."""

SCALES_BEGIN = GROUP_DEPTH // 2 * PANEL
STEPS_END = SCALES_BEGIN + PANEL
ZEROS_BEGIN = SCALES_BEGIN + 2 * PANEL
_GROUP_BYTES = {IN_STEPS: STEPS_END, WITH_SCALES: ZEROS_BEGIN, WITH_ZEROS: ZEROS_BEGIN + PANEL}


def rotated_rows(x: Tensor) -> Tensor:
    """Return rows `[..., K]` as `packed_linear` rotates them: float32."""
    return rotate_blocks(x, LARGEST_BLOCK)


def pack(weight: Tensor, weight_dtype: torch.dtype, gated: bool = False) -> tuple[Tensor, Tensor | None]:
    """Pack the weight `[N, K]` of a linear layer as bfloat16, int8 or int4 for `plugins.packed_linear`; int4 is one
    of `INT4`.

    Returns the packed weight and scales in the order of the panels: for int8, float32 [2, N padded], the scale of each
    output (max|w| / 127) and the sum of its quantized weights; for int4, float32 [1, N padded], the scale of its
    groups' steps or the factor of their scales. With `gated`, the rows are [gate; up]. Raises ValueError for another
    dtype, for a weight that is no matrix and for an odd number of gated rows.
    """
    if weight_dtype not in (*GROUP, *INT4):
        known = ", ".join(map(str, (*GROUP, *INT4)))
        raise ValueError(f"Weights are packed as {known}, not {weight_dtype}.")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"A weight to pack must be a matrix [N, K], not of shape {list(weight.shape)}.")
    num_panels = _num_panels(weight.shape[0], gated)
    if weight_dtype in INT4:
        packed, scales = _empty_int4(weight, gated, weight_dtype)
        if not weight.is_meta:
            for first, last in _ranges(num_panels):
                _pack_panels(_round(_rows_of_panels(weight, first, last, gated), weight_dtype), packed, scales, first)
        return packed, scales
    packed, scales = _empty(weight, gated, weight_dtype)
    if not weight.is_meta:
        for first, last in _ranges(num_panels):
            rows = _rows_of_panels(weight, first, last, gated)
            if weight_dtype == torch.int8:
                scale = dynamic_scale(rows, torch.int8)
                part = ByteCodes(quantize(rows, scale[:, None], torch.int8), scale)
                _pack_bytes(part, packed, scales, first)
            else:
                _pack_rows(rows.to(weight_dtype), packed, first)
    return packed, scales


def pack_codes(weight: Codes | SteppedCodes | ByteCodes, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Pack a weight that is in 4 bits already, in groups of 32, or in 8, as `pack` does; no code changes.

    Raises ValueError for an odd number of gated rows.
    """
    if isinstance(weight, ByteCodes):
        packed, factor = _empty(weight.codes, gated, torch.int8)
    else:
        packed, factor = _empty_int4(weight.codes, gated, _kind(weight))
    for first, last in _ranges(len(packed)):
        rows_of = partial(_rows_of_panels, first=first, last=last, gated=gated)
        codes = rows_of(weight.codes)
        if isinstance(weight, ByteCodes):
            _pack_bytes(ByteCodes(codes, rows_of(weight.scales[:, None])[:, 0]), packed, factor, first)
        elif isinstance(weight, SteppedCodes):
            part = SteppedCodes(codes, rows_of(weight.steps), rows_of(weight.scales[:, None])[:, 0])
            _pack_panels(part, packed, factor, first)
        else:
            zeros = None if weight.zeros is None else rows_of(weight.zeros)
            _pack_panels(Codes(codes, rows_of(weight.scales), zeros), packed, factor, first)
    return packed, factor


def is_in_steps(packed: Tensor) -> bool:
    """Return whether a packed int4 weight has steps in place of scales."""
    return packed.shape[-1] == STEPS_END


def unpack_codes(packed: Tensor, num_outputs: int, depth: int, gated: bool) -> Codes:
    """The codes of a packed int4 weight; its scales are steps or float16's, without what `scales` of `pack` says of
    their outputs."""
    panels, groups, _ = packed.shape
    words = packed[..., :SCALES_BEGIN].reshape(panels, groups, -1, PANEL, CHUNK // 2)
    codes = torch.cat((words & 15, words >> 4), dim=-1).permute(0, 1, 2, 4, 3).reshape(panels, -1, PANEL, 1)
    of_groups = packed[..., SCALES_BEGIN:ZEROS_BEGIN].contiguous()
    scales = of_groups.view(torch.int8 if is_in_steps(packed) else torch.float16).float()
    zeros = packed[..., ZEROS_BEGIN:, None]
    return Codes(
        unpack(codes, num_outputs, depth, gated),
        unpack(scales[..., None], num_outputs, groups, gated),
        unpack(zeros, num_outputs, groups, gated) if zeros.numel() else None,
    )


def _kind(weight: Codes | SteppedCodes) -> torch.dtype:
    if isinstance(weight, SteppedCodes):
        return IN_STEPS
    return WITH_SCALES if weight.zeros is None else WITH_ZEROS


def _round(weight: Tensor, kind: torch.dtype) -> Codes | SteppedCodes:
    return round_in_steps(weight) if kind == IN_STEPS else round_to_codes(weight, kind == WITH_ZEROS)


def _num_panels(outputs: int, gated: bool) -> int:
    if gated and outputs % 2:
        raise ValueError(f"Gated rows are as many gate as up rows, so {outputs} cannot be packed.")
    return -(-outputs // 2 // (PANEL // 2)) if gated else -(-outputs // PANEL)


def _ranges(num_panels: int) -> Iterator[tuple[int, int]]:
    for first in range(0, num_panels, PANELS_AT_ONCE):
        yield first, min(first + PANELS_AT_ONCE, num_panels)


def _empty(weight: Tensor, gated: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Packed weights in bfloat16 or int8, and what int8's outputs have besides."""
    num_panels, group = _num_panels(weight.shape[0], gated), GROUP[dtype]
    packed = weight.new_empty((num_panels, -(-weight.shape[1] // group), PANEL, group), dtype=dtype)
    has_scales = dtype == torch.int8
    return packed, weight.new_empty((2, num_panels * PANEL), dtype=torch.float32) if has_scales else None


def _empty_int4(weight: Tensor, gated: bool, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    num_panels, num_groups = _num_panels(weight.shape[0], gated), -(-weight.shape[1] // GROUP_DEPTH)
    packed = weight.new_empty((num_panels, num_groups, _GROUP_BYTES[kind]), dtype=torch.uint8)
    return packed, weight.new_empty((1, num_panels * PANEL), dtype=torch.float32)


def _pack_rows(rows: Tensor, packed: Tensor, first: int) -> None:
    """Write the rows of some panels, the first of which is `first`, to their places: a group is moved as one word."""
    words, group = packed.view(torch.int32)[..., 0], packed.shape[-1]
    rows = F.pad(rows, (0, -rows.shape[1] % group)).contiguous().view(torch.int32)
    words[first : first + len(rows) // PANEL] = rows.view(-1, PANEL, words.shape[1]).transpose(1, 2)


def _pack_bytes(weight: ByteCodes, packed: Tensor, scales: Tensor | None, first: int) -> None:
    """The same of bytes, with their scales and sums."""
    assert scales is not None
    _pack_rows(weight.codes, packed, first)
    outputs = slice(first * PANEL, first * PANEL + len(weight.codes))
    scales[0, outputs] = weight.scales.clamp(min=SMALLEST_SCALE)  # of outputs that there are not, 0
    scales[1, outputs] = weight.codes.sum(1, dtype=torch.int64)


def _pack_panels(weight: Codes | SteppedCodes, packed: Tensor, factor: Tensor, first: int) -> None:
    """Write the rows of some panels, the first of which is `first`, to their places."""
    last, groups = first + len(weight.codes) // PANEL, packed.shape[1]
    codes = F.pad(weight.codes, (0, -weight.codes.shape[1] % GROUP_DEPTH))
    halves = codes.view(-1, PANEL, groups, GROUP_DEPTH // CHUNK, 2, CHUNK // 2)
    words = (halves[..., 0, :] | halves[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
    packed[first:last, :, :SCALES_BEGIN] = words.reshape(last - first, groups, -1)
    outputs = slice(first * PANEL, last * PANEL)
    if isinstance(weight, SteppedCodes):
        steps = weight.steps.view(-1, PANEL, groups).transpose(1, 2).contiguous()
        packed[first:last, :, SCALES_BEGIN:] = steps.view(torch.uint8)
        factor[0, outputs] = weight.scales
        return
    scales = half_scales(weight.scales).view(-1, PANEL, groups).transpose(1, 2).contiguous()
    packed[first:last, :, SCALES_BEGIN:ZEROS_BEGIN] = scales.view(torch.uint8)
    if weight.zeros is not None:
        packed[first:last, :, ZEROS_BEGIN:] = weight.zeros.view(-1, PANEL, groups).transpose(1, 2)
    factor[0, outputs] = factors(weight.scales)


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
