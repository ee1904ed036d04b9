"""Rotary position embedding: frequencies and their scaling."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_defs.errors import ModelError
from model_defs.fields import number, require_int

LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
LARGEST_THETA, LARGEST_FACTOR = 1e15, 1e6
"""Far above those of any model; angles of the last position are finite float32 within them."""


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding; ``kind`` is ``default``, ``linear`` or ``llama3``."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return the ``[head_dim / 2]`` fp32 angular frequencies in radians per position.

        ``llama3`` keeps wavelengths below ``original_max_position / high_freq_factor``, divides those above
        ``original_max_position / low_freq_factor`` by ``factor`` and interpolates between (Llama 3.1).
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            wavelengths = 2 * math.pi / frequencies
            smooth = (self.original_max_position / wavelengths - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            smooth = smooth.clamp(0.0, 1.0)
            return (1 - smooth) * frequencies / self.factor + smooth * frequencies
        return frequencies


def rope_from_hf(hf: Mapping[str, Any]) -> RopeConfig:
    """Read RoPE parameters from a Hugging Face config, in its old (``rope_theta`` + ``rope_scaling``) or new
    (``rope_parameters``) spelling.

    ``llama3`` without ``original_max_position_embeddings`` was trained at ``max_position_embeddings``.

    Raises:
        ModelError: the scaling type is not one of default, linear, llama3, its parameters are missing, differ
            between layer types or are no numbers, or rotation is partial.
    """
    parameters: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        given = hf.get(field) or {}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise ModelError(f"{field} must be one object of numbers for all layers, found {reprlib.repr(given)}.")
        parameters.update(given)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"RoPE scaling {reprlib.repr(kind)} is not supported; supported are default, linear and llama3."
        )
    for name in {"default": (), "linear": ("factor",), "llama3": LLAMA3_FIELDS}[kind]:
        if name not in parameters:
            raise ModelError(f"RoPE scaling {kind!r} needs {name}, which the configuration lacks.")
    partial = parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial is not None and number(partial, "partial_rotary_factor", -math.inf, math.inf) != 1.0:
        raise ModelError("Partial rotary embedding is not supported; partial_rotary_factor must be 1.")
    trained = hf.get("original_max_position_embeddings", hf.get("max_position_embeddings"))
    scaling = {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **parameters}
    rope = RopeConfig(
        theta=number(parameters.get("rope_theta", hf.get("rope_theta", 10000.0)), "rope_theta", 1.0, LARGEST_THETA),
        kind=kind,
        **{name: number(scaling[name], name, 1 / LARGEST_FACTOR, LARGEST_FACTOR) for name in LLAMA3_FIELDS},
        original_max_position=require_int(
            {"original_max_position_embeddings": trained, **parameters}, "original_max_position_embeddings"
        ),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError(
            f"high_freq_factor is {rope.high_freq_factor} in config.json; it must be above low_freq_factor."
        )
    return rope


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
