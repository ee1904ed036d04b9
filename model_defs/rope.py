"""Rotary position embedding: frequencies and their scaling."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_defs.errors import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding; ``kind`` is ``default``, ``linear``, ``llama3``, ``yarn`` or ``longrope``.

    The first ``partial`` of each head rotates, the rest passes through: element i with i plus half of what rotates, or
    2i with 2i + 1 where it is ``interleaved``. What rotates is multiplied by ``amplitude``. ``longrope`` divides by
    ``long_factors`` where ``is_long``, else by ``short_factors``.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0
    interleaved: bool = False
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many elements of a head rotate."""
        return int(head_dim * self.partial)

    def for_length(self, length: int) -> "RopeConfig":
        """Return the embedding of sequences of up to ``length`` tokens: ``longrope`` has other factors for those that
        are longer than ``original_max_position``."""
        return replace(self, is_long=self.kind == "longrope" and length > self.original_max_position)

    def check(self, head_dim: int) -> None:
        """Raise ModelError unless heads of ``head_dim`` elements can be rotated so."""
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ModelError(
                f"partial_rotary_factor {self.partial:g} rotates {rotary_dim} of {head_dim} elements of a head; "
                "it must be a positive even number of them."
            )
        for name in ("short_factors", "long_factors"):
            count = len(getattr(self, name))
            if self.kind == "longrope" and count != rotary_dim // 2:
                raise ModelError(
                    f"RoPE scaling 'longrope' has {count} numbers as its {name.removesuffix('s')}; "
                    f"{rotary_dim} rotated elements of a head need {rotary_dim // 2}."
                )

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return the ``[head_dim / 2]`` fp32 angular frequencies in radians per position, 0 for what does not rotate.

        ``llama3`` keeps wavelengths below ``original_max_position / high_freq_factor``, divides those above
        ``original_max_position / low_freq_factor`` by ``factor`` and interpolates between (Llama 3.1). ``yarn`` does so
        by the number of turns within the original context, with a ramp over the dimensions (arXiv 2309.00071, section
        3.2).
        """
        dim = self.rotary_dim(head_dim)
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return torch.cat((self._scaled(self.theta**exponents, dim), torch.zeros((head_dim - dim) // 2)))

    def _scaled(self, periods: Tensor, dim: int) -> Tensor:
        """Return the frequencies of what rotates; ``periods`` ``[dim / 2]`` are positions per radian, unscaled."""
        frequencies = 1.0 / periods
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "longrope":
            return 1.0 / (torch.tensor(self.long_factors if self.is_long else self.short_factors) * periods)
        if self.kind == "yarn":
            kept = 1 - self._yarn_ramp(dim)
            return 1.0 / (self.factor * periods) * (1 - kept) + frequencies * kept
        if self.kind == "llama3":
            wavelengths = 2 * math.pi / frequencies
            smooth = (self.original_max_position / wavelengths - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            smooth = smooth.clamp(0.0, 1.0)
            return (1 - smooth) * frequencies / self.factor + smooth * frequencies
        return frequencies

    def _yarn_ramp(self, dim: int) -> Tensor:
        """Return ``[dim / 2]``: 0 for pairs that turn more than ``beta_fast`` times in the original context, 1 for
        those that turn less than ``beta_slow`` times."""

        def pair_of(turns: float) -> float:
            return dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
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


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions 0, 1, …, each ``[num_positions, head_dim / 2]`` fp32."""
    return rope_cos_sin(torch.arange(num_positions), rope.inverse_frequencies(head_dim))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[…, T, heads, head_dim]``, pairing element i with i + head_dim/2; computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
