"""What a cache's numbers become when they are stored: functions of ``x`` ``[kv_heads, tokens, head_dim]`` float32 that
return what is read back, of the same shape."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from plugins.kv_rotation import rotate_blocks

Codec = Callable[[Tensor], Tensor]
Fit = Callable[[Tensor], Codec]
"""Makes a codec of calibration data, ``[kv_heads, tokens, head_dim]``."""

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of e2m1."""
CENTROIDS, ROUNDS = 16, 30
RANGES = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of what is between a group's least and largest number."""


def half(x: Tensor) -> Tensor:
    """Round scales to float16."""
    return x.half().float()


def symmetric(x: Tensor, largest: int, group: int = 0) -> Tensor:
    """Integers up to ``largest`` times a float32 scale of each row, or a float16 one of ``group`` numbers of it."""
    rows = x.unflatten(-1, (-1, group)) if group else x
    scale = rows.abs().amax(-1, keepdim=True) / largest
    scale = (half(scale) if group else scale).clamp(min=torch.finfo(torch.float16).tiny)
    stored = (rows / scale).round().clamp(-largest, largest) * scale
    return stored.flatten(-2) if group else stored


def asymmetric(x: Tensor, bits: int, group: int = 0, fitted: bool = False) -> Tensor:
    """Integers from 0 to 2^bits - 1 between the least and the largest number: float32 each of a row, float16 of a
    ``group``. ``fitted``: between numbers nearer to each other, of RANGES those with the least squared error."""
    rows = x.unflatten(-1, (-1, group)) if group else x
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    found = []
    for share in RANGES if fitted else (1.0,):
        begin, step = low + (high - low) * (1 - share) / 2, (high - low) * share / (2**bits - 1)
        begin, step = (half(begin), half(step)) if group else (begin, step)
        step = step.clamp(min=torch.finfo(torch.float16).tiny)
        found.append(((rows - begin) / step).round().clamp(0, 2**bits - 1) * step + begin)
    choices = torch.stack(found)
    best = (choices - rows).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    stored = choices.gather(0, best.expand(1, *rows.shape))[0]
    return stored.flatten(-2) if group else stored


def by_channel(x: Tensor, bits: int, group: int, fitted: bool = False) -> Tensor:
    """``asymmetric`` of ``group`` tokens of each channel; tokens beyond whole groups stay as they are."""
    whole = x.shape[1] // group * group
    stored = asymmetric(x[:, :whole].transpose(1, 2), bits, group, fitted).transpose(1, 2)
    return torch.cat((stored, x[:, whole:]), 1)


def e4m3(x: Tensor) -> Tensor:
    """e4m3 times a float32 scale of each row."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def nvfp4(x: Tensor, group: int = 16) -> Tensor:
    """e2m1 times an e4m3 scale of each ``group`` numbers times one float32 scale of all."""
    rows = x.unflatten(-1, (-1, group))
    outer = (rows.abs().max() / (6 * 448)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (rows.abs().amax(-1, keepdim=True) / (6 * outer)).to(torch.float8_e4m3fn).float() * outer
    scaled = (rows / scale.clamp(min=torch.finfo(torch.float32).tiny)).clamp(-6, 6)
    return (nearest(scaled.abs(), FP4) * scaled.sign() * scale).flatten(-2)


def rotated(codec: Codec) -> Codec:
    """The codec between two Hadamard rotations, the second of which attention does without."""
    return lambda x: rotate_blocks(codec(rotate_blocks(x)))


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """The nearest of ``levels``, which ascend, to each number."""
    return levels[torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2)]


def k_means(values: Tensor) -> Tensor:
    """CENTROIDS levels that are near ``values``: Lloyd's algorithm from quantiles."""
    values = values.flatten().sort().values
    values = values[:: max(1, len(values) // 100_000)].contiguous()
    levels = torch.quantile(values, (torch.arange(CENTROIDS) + 0.5) / CENTROIDS)
    for _ in range(ROUNDS):
        place = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
        counts = torch.bincount(place, minlength=CENTROIDS)
        sums = torch.zeros(CENTROIDS).index_add(0, place, values)
        levels = torch.where(counts > 0, sums / counts.clamp(min=1), levels).sort().values
    return levels


def between(x: Tensor, low: Tensor, high: Tensor, levels: Tensor, outliers: bool) -> Tensor:
    """The nearest of ``levels`` of [-1, 1] laid between ``low`` and ``high``; what is not between them is exact where
    there are ``outliers``."""
    middle, radius = (high + low) / 2, ((high - low) / 2).clamp(min=1e-8)
    scaled = (x - middle) / radius
    stored = nearest(scaled.clamp(-1, 1), levels) * radius + middle
    return torch.where(scaled.abs() > 1, x, stored) if outliers else stored


def _limits(x: Tensor, dim: int, outliers: float) -> tuple[Tensor, Tensor]:
    """The least and largest of ``x`` along ``dim``, without the share of ``outliers``."""
    if not outliers:
        return x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    low, high = (torch.quantile(x, at, dim, keepdim=True) for at in (outliers / 2, 1 - outliers / 2))
    return low, high


def _levels(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    scaled = (x - (high + low) / 2) / ((high - low) / 2).clamp(min=1e-8)
    return k_means(scaled[scaled.abs() <= 1])


def nuq_by_channel(data: Tensor, outliers: float) -> Codec:
    """KVQuant's keys (arXiv 2401.18079): levels of k-means (without its weights of sensitivity), laid between limits of
    each channel, all from calibration."""
    low, high = _limits(data, 1, outliers)
    return partial(between, low=low, high=high, levels=_levels(data, low, high), outliers=outliers > 0)


def nuq_by_token(data: Tensor, outliers: float) -> Codec:
    """KVQuant's values: the same levels for all tokens, laid between limits of each token's own."""

    def tokens(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1)

    levels = _levels(tokens(data), *_limits(tokens(data), 1, outliers))

    def codec(x: Tensor) -> Tensor:
        rows = tokens(x)
        stored = between(rows, *_limits(rows, 1, outliers), levels, outliers > 0)
        return stored.unflatten(1, (x.shape[0], -1)).transpose(0, 1)

    return codec
