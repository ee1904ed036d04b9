"""int4 weights: codes of 4 bits in groups of 32 along the depth, each group with a scale and perhaps a zero point.

A weight is (code - zero point) * scale, with codes from 0 to 15; without zero points, zero is 8. A scale is a float16
times its output's factor, a power of two, which keeps scales of any size among float16's normal numbers.
"""

from collections.abc import Sequence
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


def round_to_codes(weight: Tensor) -> Codes:
    """Round a weight `[N, K]` of floats to the nearest codes, with the scale of each group that leaves the smallest
    squared error of some.

    The largest magnitude of a group, or a share of it, is given the outermost code 0; from the codes of each such scale
    follows the scale that fits them best.
    """
    outputs, depth = weight.shape
    groups = F.pad(weight.float(), (0, -depth % GROUP_DEPTH)).view(outputs, -1, GROUP_DEPTH)
    outermost = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best = best_gain = torch.zeros_like(outermost)
    for share in _CLIPPING:
        levels = _levels(groups, outermost * (-share / MIDDLE))
        products, squares = (groups * levels).sum(2, keepdim=True), levels.square().sum(2, keepdim=True)
        scale = products / squares.clamp(min=1)
        gain = products * scale  # the squares that this scale explains
        is_better = gain > best_gain
        best, best_gain = torch.where(is_better, scale, best), torch.where(is_better, gain, best_gain)
    scales = stored_scales(best[..., 0])
    codes = (_levels(groups, scales[..., None]) + MIDDLE).to(torch.uint8)
    return Codes(codes.view(outputs, -1)[:, :depth], scales)


def _levels(groups: Tensor, scale: Tensor) -> Tensor:
    """The nearest multiples of `scale`, -8 to 7; 0 where it is 0."""
    return (groups / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(-MIDDLE, LARGEST_CODE - MIDDLE)


def factors(scales: Tensor) -> Tensor:
    """Return the power of two of each output, float32 `[N]`, that brings its largest scale into [2^14, 2^15)."""
    exponent = torch.frexp(scales.abs().amax(1)).exponent - 15
    return torch.ldexp(torch.ones(len(scales)), exponent.clamp(min=-126))


def half_scales(scales: Tensor) -> Tensor:
    """Return scales over their output's factor as float16 `[N, groups]`, 0 below the smallest normal number."""
    halves = (scales / factors(scales)[:, None]).half()
    return torch.where(halves.abs() < torch.finfo(torch.float16).tiny, 0.0, halves)


def stored_scales(scales: Tensor) -> Tensor:
    """Return the scales as packing keeps them, float32 `[N, groups]`."""
    return half_scales(scales).float() * factors(scales)[:, None]
