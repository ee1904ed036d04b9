"""Rounding a weight to 4 or 8 bits by what its inputs look like (GPTQ, arXiv 2210.17323, section 3).

Columns are rounded one after the other. What rounding one leaves is taken back by those that follow, as far as inputs
go together: with H the sum of x xᵀ over inputs x, the rows of the upper Cholesky factor of H⁻¹ say how.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from plugins.kv_quantization import LARGEST, dynamic_scale
from plugins.packed_linear.int4 import GROUP_DEPTH, LARGEST_CODE, MIDDLE, Codes, round_to_codes
from plugins.packed_linear.int4_steps import SteppedCodes, half_scales_of_steps, round_in_steps
from plugins.packed_linear.int8 import ByteCodes

DAMPING = 0.01
"""Of the mean of H's diagonal, added to it: inputs that go together exactly have no inverse."""

_COLUMNS_AT_ONCE = 128
"""Of a weight without groups, that take back what they leave before the others do."""

Levels = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of a column ``[N]``, the whole numbers that its elements become and the values of these."""


def round_by_inputs(weight: Tensor, moments: Tensor) -> SteppedCodes:
    """Round ``weight`` ``[N, K]`` to codes in steps, given ``moments`` ``[K, K]``, the sum of x xᵀ over the layer's
    inputs x.

    Steps are, of each group as the columns before it left it, those of ``round_in_steps``, and scales such that float16
    holds them exactly.
    """
    step, found = half_scales_of_steps(weight), []

    def begin(group: Tensor) -> Levels:
        steps = round_in_steps(group, step).steps
        found.append(steps)
        return _levels((steps * step[:, None])[:, 0], torch.full_like(step, MIDDLE))

    levels = _round_columns(weight, moments, GROUP_DEPTH, begin)
    return SteppedCodes((levels + MIDDLE).to(torch.uint8), torch.cat(found, dim=1), step)


def round_to_codes_by_inputs(weight: Tensor, moments: Tensor, zero_points: bool = False) -> Codes:
    """The same in groups with scales of their own, and with zero points where asked for: those that ``round_to_codes``
    gives each group as the columns before it left it."""
    found: list[Codes] = []

    def begin(group: Tensor) -> Levels:
        found.append(round_to_codes(group, zero_points))
        zeros = found[-1].with_zeros().zeros
        assert zeros is not None
        return _levels(found[-1].scales[:, 0], zeros[:, 0].float())

    levels = _round_columns(weight, moments, GROUP_DEPTH, begin)
    scales = torch.cat([codes.scales for codes in found], dim=1)
    if not zero_points:
        return Codes((levels + MIDDLE).to(torch.uint8), scales)
    zeros = torch.cat([codes.with_zeros().zeros for codes in found], dim=1)  # type: ignore[misc]
    spread = zeros.repeat_interleave(GROUP_DEPTH, 1)[:, : weight.shape[1]]
    return Codes((levels + spread).to(torch.uint8), scales, zeros)


def round_to_bytes_by_inputs(weight: Tensor, moments: Tensor) -> ByteCodes:
    """The same as int8, with the scale of each output that packing gives it: max|w| / 127."""
    scale, largest = dynamic_scale(weight, torch.int8), LARGEST[torch.int8]

    def nearest(column: Tensor) -> tuple[Tensor, Tensor]:
        level = (column / scale).round().clamp(-largest, largest)
        return level, level * scale

    levels = _round_columns(weight, moments, _COLUMNS_AT_ONCE, lambda _: nearest)
    return ByteCodes(levels.to(torch.int8), scale)


def _levels(scale: Tensor, zero: Tensor) -> Levels:
    """Whole multiples of ``scale`` ``[N]`` whose codes are 0 to 15 with this zero point ``[N]``; 0 where it is 0."""

    def nearest(column: Tensor) -> tuple[Tensor, Tensor]:
        level = (column / scale).nan_to_num(0.0, 0.0, 0.0).round()
        level = torch.minimum(torch.maximum(level, -zero), LARGEST_CODE - zero)
        return level, level * scale

    return nearest


def _round_columns(weight: Tensor, moments: Tensor, depth: int, begin: Callable[[Tensor], Levels]) -> Tensor:
    """Return the whole numbers of all columns, float32 ``[N, K]``; ``begin`` is given each ``depth`` columns as those
    before them left them."""
    rest, factor, levels = weight.float().clone(), _inverse_factor(moments), torch.empty(weight.shape)
    for first in range(0, weight.shape[1], depth):
        last = min(first + depth, weight.shape[1])
        group = rest[:, first:last].T.contiguous()  # columns lie together
        nearest, errors = begin(rest[:, first:last].contiguous()), torch.empty_like(group)
        for index, column in enumerate(range(first, last)):
            levels[:, column], value = nearest(group[index])
            errors[index] = (group[index] - value) / factor[column, column]
            group[index + 1 :] -= torch.outer(factor[column, column + 1 : last], errors[index])
        rest[:, last:] -= errors.T @ factor[first:last, last:]
    return levels


def _inverse_factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments, float32 ``[K, K]``."""
    damped = moments.double().clone()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean()
    diagonal[diagonal == 0] = 1.0  # no input was ever other than zero
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
