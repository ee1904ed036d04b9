"""Rotary position embedding: frequencies and their scaling."""

import math

import torch
from torch import Tensor

from model_defs.rope_config import QueryGrowth, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the ``[head_dim / 2]`` fp32 angular frequencies in radians per position, 0 for what does not rotate.

    ``llama3`` keeps wavelengths below ``original_max_position / high_freq_factor``, divides those above
    ``original_max_position / low_freq_factor`` by ``factor`` and interpolates between (Llama 3.1). ``yarn`` does so
    by the number of turns within the original context, with a ramp over the dimensions (arXiv 2309.00071, section
    3.2).
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return torch.cat((_scaled(rope, rope.theta**exponents, dim), torch.zeros((head_dim - dim) // 2)))


def _scaled(rope: RopeConfig, periods: Tensor, dim: int) -> Tensor:
    """Return the frequencies of what rotates; ``periods`` ``[dim / 2]`` are positions per radian, unscaled."""
    if rope.kind == "none":
        return torch.zeros(dim // 2)
    frequencies = 1.0 / periods
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "proportional":
        return torch.where(torch.arange(dim // 2) < int(rope.partial * dim // 2), frequencies, 0) / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.long_factors if rope.is_long else rope.short_factors) * periods)
    if rope.kind == "yarn":
        kept = 1 - _yarn_ramp(rope, dim)
        return 1.0 / (rope.factor * periods) * (1 - kept) + frequencies * kept
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies


def _yarn_ramp(rope: RopeConfig, dim: int) -> Tensor:
    """Return ``[dim / 2]``: 0 for pairs that turn more than ``beta_fast`` times in the original context, 1 for
    those that turn less than ``beta_slow`` times."""

    def pair_of(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    return ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)


def frequency_buffer(rotation: int) -> str:
    """Return what graphs and engines call the frequencies of ``ModelConfig.rotations`` at an index."""
    return "inverse_frequencies" if rotation == 0 else f"inverse_frequencies_{rotation}"


def rope_cos_sin(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each ``[…, T, head_dim / 2]`` fp32, for ``positions`` ``[…, T]``."""
    angles = positions.float()[..., None] * inverse_frequencies
    return angles.cos(), angles.sin()


def query_growth(growth: QueryGrowth | None, positions: Tensor) -> Tensor | None:
    """Return what queries at ``positions`` ``[…, T]`` are multiplied by, fp32 ``[…, T, 1]``; None for 1."""
    return None if growth is None else 1 + growth.beta * (1 + positions[..., None] // growth.length).float().log()


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions 0, 1, …, each ``[num_positions, head_dim / 2]`` fp32."""
    return rope_cos_sin(torch.arange(num_positions), inverse_frequencies(rope, head_dim))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[…, T, heads, head_dim]``, pairing element i with i + head_dim/2; computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
