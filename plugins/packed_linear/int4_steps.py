"""int4 weights in steps: a group's scale is a whole number of its output's smallest one.

A weight is (code - 8) * steps * scale: codes of 4 bits from 0 to 15, for each group of 32 along the depth steps from
-15 to 15, for each output a scale in float32. So (code - 8) * steps is a signed byte, and a product with bytes is a sum
of integers, over the whole depth. These are the two-level scales of VS-Quant (arXiv 2102.04602, section 4.4), with the
ranges of QServe's progressive quantization (arXiv 2405.04532, section 4.1), in which 4 bits become 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from plugins.packed_linear.int4 import GROUP_DEPTH, MIDDLE, Codes, nearest_levels, power_of_two, round_to_codes

LARGEST_STEPS = 15
"""Of either sign: codes less 8 reach from -8 to 7, and their products with steps are bytes."""

FITTING = 2**-10
"""By how much a scale may differ from a whole number of steps, relatively: twice what rounding to float16 takes."""

_OUTPUTS_AT_ONCE = 256
"""Of which one that has no steps ends the search for all."""

_BITS_BESIDE_STEPS = 7
"""Of float16's 11 bits, those that a step may have for each multiple up to LARGEST_STEPS to be exact."""


@dataclass(frozen=True)
class SteppedCodes:
    """A weight `[N, K]`. codes: uint8 `[N, K]`, 0 to 15. steps: int8 `[N, groups]` of 32 columns each, the last perhaps
    of fewer. scales: float32 `[N]`, positive."""

    codes: Tensor
    steps: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """Return the weight, float32 `[N, K]`."""
        return Codes(self.codes, self.steps.float()).dequantize() * self.scales[:, None]

    def as_codes(self) -> Codes:
        """Return it with a scale for each group, rounded to float16."""
        return Codes(self.codes, (self.steps * self.scales[:, None]).half().float())


def join_steps(parts: Sequence[SteppedCodes]) -> SteppedCodes:
    """Return parts with equally many columns as one weight, one below the other."""
    codes, steps, scales = ([getattr(part, name) for part in parts] for name in ("codes", "steps", "scales"))
    return SteppedCodes(torch.cat(codes), torch.cat(steps), torch.cat(scales))


def round_in_steps(weight: Tensor, scales: Tensor | None = None) -> SteppedCodes:
    """Round a weight `[N, K]` of floats to the nearest codes, with `scales` `[N]` or 1/15 of the largest that
    `round_to_codes` gives an output's groups.

    Of a group's steps, the nearest to the scale that `round_to_codes` gives it and one more, those with the smaller
    squared error are taken.
    """
    outputs, depth = weight.shape
    wanted = round_to_codes(weight).scales
    scales = _smallest_steps(wanted) if scales is None else scales
    groups = F.pad(weight.float(), (0, -depth % GROUP_DEPTH)).view(outputs, -1, GROUP_DEPTH)
    unit = power_of_two(groups.abs().amax((1, 2)), 1)  # so that squares are neither too large nor nothing
    groups, step = groups / unit[:, None, None], (scales / unit)[:, None, None]
    ratio = wanted / scales[:, None]

    def rounded(more: int) -> tuple[Tensor, Tensor, Tensor]:
        steps = (ratio.abs().round() + more).clamp(max=LARGEST_STEPS) * ratio.sign()
        levels = nearest_levels(groups, steps[..., None] * step, MIDDLE)
        return levels, steps, (groups - levels * steps[..., None] * step).square().sum(2)

    (levels, steps, error), (other_levels, more_steps, other_error) = rounded(0), rounded(1)
    is_better = other_error < error
    levels = torch.where(is_better[..., None], other_levels, levels)
    codes = (levels + MIDDLE).to(torch.uint8).view(outputs, -1)[:, :depth]
    return SteppedCodes(codes, torch.where(is_better, more_steps, steps).to(torch.int8), scales)


def in_steps(weight: Codes) -> SteppedCodes | None:
    """Return a weight that is in 4 bits already with every code as it is and its scales in steps.

    None where there are zero points or scales that are not `are_steps`.
    """
    if weight.zeros is not None:
        return None
    scales, fits = _fitting_steps(weight.scales)
    if not fits.all():
        return None
    weight = weight.in_groups_of(GROUP_DEPTH)
    return SteppedCodes(weight.codes, (weight.scales / scales[:, None]).round().to(torch.int8), scales)


def are_steps(scales: Tensor) -> bool:
    """Return whether the scales of each output, float32 `[N, groups]`, are whole numbers of a fraction of the largest
    of them, 1/15 at least, up to FITTING."""
    return all(bool(_fitting_steps(rows)[1].all()) for rows in scales.split(_OUTPUTS_AT_ONCE))


def half_scales_of_steps(weight: Tensor) -> Tensor:
    """Return about 1/15 of the largest scale that `round_to_codes` gives the groups of each output of `weight`,
    float32 `[N]`: numbers of which float16 holds each multiple up to the 15th, unless it is too large."""
    return _round_to_halves(_smallest_steps(round_to_codes(weight).scales))


def _round_to_halves(scales: Tensor) -> Tensor:
    """7 of float16's 11 bits, as a whole number up to 15 takes the others; float16's smallest number at least."""
    unit = torch.ldexp(torch.ones_like(scales), (torch.frexp(scales).exponent - _BITS_BESIDE_STEPS).clamp(min=-24))
    return ((scales / unit).round() * unit).clamp(min=2.0**-24)


def _smallest_steps(scales: Tensor, largest: int = LARGEST_STEPS) -> Tensor:
    """Each output's scale `[N]` if the largest of its groups has so many steps, at least the smallest normal number."""
    return (scales.abs().amax(1) / largest).clamp(min=torch.finfo(torch.float32).tiny)


def _fitting_steps(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Each output's scale `[N]`, and whether those of its groups are whole steps with it; the smallest that fits,
    because an output's largest may have less than 15 steps."""
    found, fits = _smallest_steps(scales), torch.zeros(len(scales), dtype=torch.bool)
    for largest in range(LARGEST_STEPS, 0, -1):
        left = (~fits).nonzero()[:, 0]
        if not len(left):
            break
        step = _smallest_steps(scales[left], largest)
        ratio = scales[left] / step[:, None]
        is_whole = ((ratio - ratio.round()).abs() <= FITTING * ratio.abs()).all(1)
        found[left[is_whole]], fits[left[is_whole]] = step[is_whole], True
    return found, fits
