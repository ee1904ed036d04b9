"""MiniCache's merge of neighbouring layers' K and V (arXiv 2405.14366, section 4), training-free.

A vector is its length times its direction. Of two layers' vectors of one token and KV head the directions become one,
on the great circle between them, and each layer keeps its lengths. Where the directions lie too far apart both vectors
are retained. RoPE turns both by the same rotation, so merging before it or after it is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

INTERPOLATION = 0.6
"""The paper's t: how far of the way from the upper layer's direction to the lower one's the merged direction lies."""
RETENTION = 0.05
"""The paper's gamma: vectors in the last gamma of the range of distances are retained."""


@dataclass(frozen=True)
class MergeRule:
    """``interpolation`` t and ``retention`` gamma, both in 0..1."""

    interpolation: float = INTERPOLATION
    retention: float = RETENTION


@dataclass(frozen=True)
class Merged:
    """What is kept of two layers' vectors ``[..., dim]``: one ``direction`` ``[..., dim]`` (of length 1, or 0 where
    both are zero), each layer's ``lengths`` ``[..., 1]``, and where both are ``retained``, bool ``[...]``."""

    direction: Tensor
    lengths: tuple[Tensor, Tensor]
    retained: Tensor

    def restore(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each layer reads; ``lower`` and ``upper`` give the vectors that are retained."""
        first, second = (
            torch.where(self.retained[..., None], own, self.direction * length)
            for own, length in zip((lower, upper), self.lengths, strict=True)
        )
        return first, second


def distance(lower: Tensor, upper: Tensor) -> Tensor:
    """Return the angle between vectors ``[..., dim]`` over pi, ``[...]`` in 0..1; 0 where one of them is zero.

    From the half angle, whose sine and cosine are lengths of differences and sums, so that it is exact near 0 and 1.
    """
    a, b = _directions(lower, upper)
    return 2 / torch.pi * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


def threshold(distances: Tensor, retention: float, dim: int) -> Tensor:
    """Return the largest distance that is merged, with ``dim`` (the tokens) kept as 1: max - gamma (max - min)."""
    low, high = distances.aminmax(dim=dim, keepdim=True)
    return high - retention * (high - low)


def merge(lower: Tensor, upper: Tensor, interpolation: float, limit: Tensor | float) -> Merged:
    """Merge vectors ``[..., dim]``; retain those further apart than ``limit`` (a number, or what broadcasts to
    ``distance``), and always opposite ones, between which no direction is the nearest."""
    a, b = _directions(lower, upper)
    far = distance(lower, upper)
    angle = torch.pi * far[..., None]
    sine = angle.sin()
    flat = sine.abs() < torch.finfo(a.dtype).eps ** 0.5  # parallel: the great circle is a line there
    first = torch.where(flat, interpolation, (interpolation * angle).sin() / sine.where(~flat, 1))
    second = torch.where(flat, 1 - interpolation, ((1 - interpolation) * angle).sin() / sine.where(~flat, 1))
    direction = F.normalize(first * a + second * b, dim=-1)
    opposite = flat[..., 0] & (far > 0.5)
    lengths = lower.norm(dim=-1, keepdim=True), upper.norm(dim=-1, keepdim=True)
    return Merged(direction, lengths, (far > limit) | opposite)


def shared_target(layers: Sequence[Tensor], head_dim: int, rule: MergeRule = MergeRule()) -> Tensor:
    """Return what one cache of two neighbouring layers is fitted to, ``[T, 2 * kv_dim]``: K and V of a sample, the
    lower layer's first, each ``[T, 2 * kv_dim]``.

    One cache has one length for both layers, the mean of theirs. A retained vector is the lower layer's, which is the
    owner. One layer alone is returned as it is.
    """
    if len(layers) == 1:
        return layers[0]
    lower, upper = (layer.unflatten(-1, (-1, head_dim)) for layer in layers)
    limit = threshold(distance(lower, upper), rule.retention, dim=0)
    merged = merge(lower, upper, rule.interpolation, limit)
    shared = merged.direction * (merged.lengths[0] + merged.lengths[1]) / 2
    return torch.where(merged.retained[..., None], lower, shared).flatten(-2)


def _directions(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors of length 1; a zero vector takes the other's direction, as its length restores it from any."""
    tiny = torch.finfo(lower.dtype).tiny
    a, b = (F.normalize(x, dim=-1, eps=tiny) for x in (lower, upper))
    no_a, no_b = (~x.any(-1, keepdim=True) for x in (lower, upper))
    return torch.where(no_a, b, a), torch.where(no_b, a, b)
