"""The logarithm of the weight that a Gaussian query to come is expected to give a key."""

import torch
from torch import Tensor


def expected_exponent(
    queries: Tensor, keys: Tensor, rope: tuple[Tensor, Tensor], num_future: int, with_covariance: bool
) -> Tensor:
    """Return ``[kv_heads, group, L]`` float64, up to a constant of each head: of ``keys`` ``[kv_heads, L, d]``.

    ``queries`` ``[W, heads, d]`` are the rotated ones of the last W of L positions. Their mean m and covariance C
    before RoPE are turned to the mean rotation of the next ``num_future`` positions, or of as many as ``rope``, cos and
    sin ``[positions, d/2]``, has. A key k is expected to get exp(k m / sqrt(d) + k C k / (2 d)) (arXiv 2510.00636,
    section 3.1).
    """
    kv_heads, length, dim = keys.shape
    cos, sin = (table.double() for table in rope)
    window = slice(length - len(queries), length)
    raw = _rotate(queries.double(), cos[window, None], -sin[window, None]).transpose(0, 1)  # [heads, W, d]
    # Position length + j turns by the one, then by the other.
    later = cos[:num_future].mean(0), sin[:num_future].mean(0)
    turn_cos = cos[length] * later[0] - sin[length] * later[1]
    turn_sin = sin[length] * later[0] + cos[length] * later[1]
    mean = raw.mean(1, keepdim=True)
    per_group = keys.double().repeat_interleave(len(raw) // kv_heads, dim=0)
    exponent = (per_group @ _rotate(mean, turn_cos, turn_sin).mT)[..., 0] / dim**0.5
    if with_covariance:
        centred = _rotate(raw - mean, turn_cos, turn_sin)
        exponent = exponent + (per_group @ centred.mT).square().sum(-1) / (2 * dim * len(queries))
    return exponent.unflatten(0, (kv_heads, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[..., d]``: element i and i + d/2 are the two sides of a plane."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
