"""Rounding a weight to 4 or 8 bits by what its inputs look like (GPTQ, arXiv 2210.17323, section 3).

Columns are rounded one after the other. What rounding one leaves is taken back by those that follow, as far as inputs
go together: with H the sum of x xᵀ over inputs x, the rows of the upper Cholesky factor of H⁻¹ say how.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.kv_quantization import LARGEST, dynamic_scale
from plugins.packed_linear.int4 import GROUP_DEPTH, LARGEST_CODE, MIDDLE, Codes, round_to_codes
from plugins.packed_linear.int4_steps import SteppedCodes, half_scales_of_steps, round_in_steps
from plugins.packed_linear.int8 import ByteCodes

DAMPING = 0.01
"""Of the mean of H's diagonal, added to it: inputs that go together exactly have no inverse."""


@dataclass(frozen=True)
class _Levels:
    """What the elements of columns become: whole multiples of ``scale``, from ``lowest`` to ``highest``, each ``[N]``;
    0 where the scale is 0."""

    scale: Tensor
    lowest: Tensor
    highest: Tensor

    @classmethod
    def of_codes(cls, scale: Tensor, zero: Tensor) -> "_Levels":
        """Those whose codes are 0 to 15 with this zero point."""
        return cls(scale, -zero, LARGEST_CODE - zero)


def round_by_inputs(weight: Tensor, moments: Tensor) -> SteppedCodes:
    """Round ``weight`` ``[N, K]`` to codes in steps, given ``moments`` ``[K, K]``, the sum of x xᵀ over the layer's
    inputs x.

    Steps are, of each group as the columns before it left it, those of ``round_in_steps``, and scales such that float16
    holds them exactly.
    """
    step, found = half_scales_of_steps(weight), []

    def begin(group: Tensor) -> _Levels:
        steps = round_in_steps(group, step).steps
        found.append(steps)
        return _Levels.of_codes((steps * step[:, None])[:, 0], torch.full_like(step, MIDDLE))

    levels = _round_columns(weight, moments, begin)
    return SteppedCodes((levels + MIDDLE).to(torch.uint8), torch.cat(found, dim=1), step)


def round_to_codes_by_inputs(weight: Tensor, moments: Tensor, zero_points: bool = False) -> Codes:
    """The same in groups with scales of their own, and with zero points where asked for: those that ``round_to_codes``
    gives each group as the columns before it left it."""
    found: list[Codes] = []

    def begin(group: Tensor) -> _Levels:
        found.append(round_to_codes(group, zero_points))
        zeros = found[-1].with_zeros().zeros
        assert zeros is not None
        return _Levels.of_codes(found[-1].scales[:, 0], zeros[:, 0].float())

    levels = _round_columns(weight, moments, begin)
    scales = torch.cat([codes.scales for codes in found], dim=1)
    if not zero_points:
        return Codes((levels + MIDDLE).to(torch.uint8), scales)
    zeros = torch.cat([codes.with_zeros().zeros for codes in found], dim=1)  # type: ignore[misc]
    spread = zeros.repeat_interleave(GROUP_DEPTH, 1)[:, : weight.shape[1]]
    return Codes((levels + spread).to(torch.uint8), scales, zeros)


def round_to_bytes_by_inputs(weight: Tensor, moments: Tensor) -> ByteCodes:
    """The same as int8, with the scale of each output that packing gives it: max|w| / 127."""
    scale = dynamic_scale(weight, torch.int8)
    largest = torch.full_like(scale, LARGEST[torch.int8])
    levels = _round_columns(weight, moments, lambda _: _Levels(scale, -largest, largest))
    return ByteCodes(levels.to(torch.int8), scale)


def _round_columns(weight: Tensor, moments: Tensor, begin: Callable[[Tensor], _Levels]) -> Tensor:
    """Return the whole numbers of all columns, float32 ``[N, K]``; ``begin`` is given each 32 columns as those before
    them left them."""
    factor = _inverse_factor(moments)
    factor /= factor.diagonal()[:, None].clone()
    rest = weight.float().T.clone(memory_format=torch.contiguous_format)  # columns lie together
    for first in range(0, len(rest), GROUP_DEPTH):
        last = min(first + GROUP_DEPTH, len(rest))
        group, levels = rest[first:last], begin(rest[first:last].T.contiguous())
        scale = torch.where(levels.scale == 0, 1.0, levels.scale)
        lowest, highest = (x * (levels.scale != 0) for x in (levels.lowest, levels.highest))
        group /= scale
        errors = torch.zeros_like(group)
        for column, shares, error in zip(group, factor[first:last, first:last].T.contiguous(), errors, strict=True):
            left = torch.addmv(column, errors.T, shares, alpha=-1)  # of columns that follow, errors are still 0
            torch.clamp(left.round(), lowest, highest, out=column)
            torch.sub(left, column, out=error)
        rest[last:].addmm_(factor[first:last, last:].T, errors.mul_(scale), alpha=-1)
    return rest.T


def _inverse_factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments, float32 ``[K, K]``.

    It is the inverse of the upper factor R of H = R Rᵀ, which is the lower one of H with its rows and columns in the
    opposite order."""
    damped = moments.double().clone()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean()
    diagonal[diagonal == 0] = 1.0  # no input was ever other than zero
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(upper, torch.eye(len(upper), dtype=torch.double), upper=True).float()
