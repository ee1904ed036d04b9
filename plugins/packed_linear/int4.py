"""int4 weights: codes of 4 bits in groups of 32 along the depth, each group with a scale and perhaps a zero point.

A weight is (code - zero point) * scale, with codes from 0 to 15; without zero points, zero is 8. A scale is a float16
times its output's factor, a power of two, which keeps scales of any size among float16's normal numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP_DEPTH = 32
MIDDLE = 8
"""The zero point of groups that have none of their own."""

LARGEST_CODE = 15

_CLIPPING = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of a group's largest magnitude that its outermost code may stand for at first."""


@dataclass(frozen=True)
class Codes:
    """A weight `[N, K]` in 4 bits.

    codes: uint8 `[N, K]`, 0 to 15. scales: float32 `[N, groups]`, of either sign, one for each `group_depth` columns;
    the last group may have fewer. zeros: uint8 `[N, groups]`, the codes that stand for 0, or None where all are 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_depth: int = GROUP_DEPTH

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """Return the weight, float32 `[N, K]`."""
        zeros = MIDDLE if self.zeros is None else self._spread(self.zeros).float()
        return (self.codes.float() - zeros) * self._spread(self.scales)

    def rows(self, order: Tensor | None, factors: Tensor | None) -> "Codes":
        """Return the outputs of `order` `[N']`, by default all, each multiplied by its factor `[N']` where there are
        some."""
        take = slice(None) if order is None else order
        scales, zeros = self.scales[take], None if self.zeros is None else self.zeros[take]
        scales = scales if factors is None else scales * factors[:, None]
        return Codes(self.codes[take], scales, zeros, self.group_depth)

    def in_groups_of(self, depth: int) -> "Codes":
        """Return the same weight with a scale for each `depth` columns, a divisor of `group_depth`."""
        times, groups = self.group_depth // depth, -(-self.codes.shape[1] // depth)
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)[:, :groups]
        scales = self.scales.repeat_interleave(times, 1)[:, :groups]
        return Codes(self.codes, scales, zeros, depth)

    def with_zeros(self) -> "Codes":
        """Return the same weight with a zero point for each group."""
        if self.zeros is not None:
            return self
        return replace(self, zeros=torch.full(self.scales.shape, MIDDLE, dtype=torch.uint8))

    def _spread(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.group_depth, 1)[:, : self.codes.shape[1]]


def join(parts: Sequence[Codes]) -> Codes:
    """Return parts with equally many columns as one weight, one below the other, in groups of 32; all have zero points
    where one has."""
    parts = [part.in_groups_of(GROUP_DEPTH) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([part.with_zeros().zeros for part in parts])
    return Codes(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]), zeros)


def round_to_codes(weight: Tensor, zero_points: bool = False) -> Codes:
    """Round a weight `[N, K]` of floats to the nearest codes, with the scale of each group that leaves the smallest
    squared error of some.

    Without zero points, the largest magnitude of a group, or a share of it, is given the outermost code 0; with them,
    the codes are spread over a group's range, or a share of it. From the codes of each such scale follows the scale
    that fits them best.
    """
    outputs, depth = weight.shape
    groups = F.pad(weight.float(), (0, -depth % GROUP_DEPTH)).view(outputs, -1, GROUP_DEPTH)
    unit = power_of_two(groups.abs().amax(2, keepdim=True), 1)  # so that squares are neither too large nor nothing
    groups = groups / unit
    best = best_gain = torch.zeros_like(groups[..., :1])
    best_zero = torch.full_like(best, MIDDLE)
    for scale, zero in _ranges(groups) if zero_points else _outermost(groups):
        levels = nearest_levels(groups, scale, zero)
        products, squares = (groups * levels).sum(2, keepdim=True), levels.square().sum(2, keepdim=True)
        scale = products / squares.clamp(min=1)
        gain = products * scale  # the squares that this scale explains
        is_better = gain > best_gain
        best, best_gain = torch.where(is_better, scale, best), torch.where(is_better, gain, best_gain)
        best_zero = torch.where(is_better, zero, best_zero)
    scales = stored_scales((best * unit)[..., 0])
    codes = (
        (nearest_levels(groups, scales[..., None] / unit, best_zero) + best_zero)
        .to(torch.uint8)
        .view(outputs, -1)[:, :depth]
    )
    return Codes(codes, scales, best_zero[..., 0].to(torch.uint8) if zero_points else None)


def _outermost(groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales by which shares of each group's largest magnitude have the code 0, and the zero point 8."""
    outermost = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    zero = torch.full_like(outermost, MIDDLE)
    for share in _CLIPPING:
        yield outermost * (-share / MIDDLE), zero


def _ranges(groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales by which the codes cover shares of each group's range, 0 within it, and their zero points."""
    lowest, highest = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    exact = (-lowest * LARGEST_CODE / (highest - lowest)).nan_to_num(MIDDLE)
    for share in _CLIPPING:
        for zero in (exact.floor(), exact.ceil()):
            yield (highest - lowest) * (share / LARGEST_CODE), zero


def nearest_levels(groups: Tensor, scale: Tensor, zero: Tensor | int) -> Tensor:
    """Return the nearest multiples of `scale` whose codes are 0 to 15, as whole numbers; 0 where it is 0."""
    return (groups / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(-zero, LARGEST_CODE - zero)


def factors(scales: Tensor) -> Tensor:
    """Return the power of two of each output, float32 `[N]`, that brings its largest scale into [2^14, 2^15)."""
    return power_of_two(scales.abs().amax(1), 15)


def power_of_two(x: Tensor, exponent: int) -> Tensor:
    """Return the power of two, 2^-126 at least, that divides each of `x` into [2^(exponent - 1), 2^exponent)."""
    return torch.ldexp(torch.ones_like(x), (torch.frexp(x).exponent - exponent).clamp(min=-126))


def half_scales(scales: Tensor) -> Tensor:
    """Return scales over their output's factor as float16 `[N, groups]`, 0 below the smallest normal number."""
    halves = (scales / factors(scales)[:, None]).half()
    return torch.where(halves.abs() < torch.finfo(torch.float16).tiny, 0.0, halves)


def stored_scales(scales: Tensor) -> Tensor:
    """Return the scales as packing keeps them, float32 `[N, groups]`."""
    return half_scales(scales).float() * factors(scales)[:, None]
