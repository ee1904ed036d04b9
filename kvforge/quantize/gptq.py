"""Rounding a weight to 4 bits by what its inputs look like (GPTQ, arXiv 2210.17323, section 3).

Columns are rounded one after the other. What rounding one leaves is taken back by those that follow, as far as inputs
go together: with H the sum of x xᵀ over inputs x, the rows of the upper Cholesky factor of H⁻¹ say how.
"""

import torch
from torch import Tensor

from plugins.packed_linear.int4 import GROUP_DEPTH, LARGEST_CODE, MIDDLE, Codes
from plugins.packed_linear.int4_steps import half_scales_of_steps, round_in_steps

DAMPING = 0.01
"""Of the mean of H's diagonal, added to it: inputs that go together exactly have no inverse."""


def round_by_inputs(weight: Tensor, moments: Tensor) -> Codes:
    """Round ``weight`` ``[N, K]`` given ``moments`` ``[K, K]``, the sum of x xᵀ over the layer's inputs x.

    Scales are whole steps: of each group as the columns before it left it those of ``round_in_steps``, which float16
    holds exactly.
    """
    rest, factor, step = weight.float().clone(), _inverse_factor(moments), half_scales_of_steps(weight)
    depth = weight.shape[1]
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = []
    for first in range(0, depth, GROUP_DEPTH):
        last = min(first + GROUP_DEPTH, depth)
        scale = round_in_steps(rest[:, first:last], step).as_codes().scales
        errors = torch.empty(len(weight), last - first)
        for column in range(first, last):
            level = (rest[:, column : column + 1] / scale).nan_to_num(0.0, 0.0, 0.0).round()
            level = level.clamp(-MIDDLE, LARGEST_CODE - MIDDLE)
            codes[:, column] = (level[:, 0] + MIDDLE).to(torch.uint8)
            error = (rest[:, column] - (level * scale)[:, 0]) / factor[column, column]
            rest[:, column:last] -= error[:, None] * factor[column, column:last]
            errors[:, column - first] = error
        rest[:, last:] -= errors @ factor[first:last, last:]
        scales.append(scale)
    return Codes(codes, torch.cat(scales, dim=1))


def _inverse_factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments, float32 ``[K, K]``."""
    damped = moments.double().clone()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean()
    diagonal[diagonal == 0] = 1.0  # no input was ever other than zero
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
