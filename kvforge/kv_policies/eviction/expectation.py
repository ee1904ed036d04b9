"""The logarithm of the weight that a Gaussian query to come is expected to give a key."""

import torch
from torch import Tensor

_BLOCK = 2048  # keys that are looked at together


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
    window = slice(length - len(queries), length)
    cos, sin = (table[window, None].double() for table in rope)
    raw = _rotate(queries.double(), cos, -sin).transpose(0, 1).unflatten(0, (kv_heads, -1))  # [kv_heads, group, W, d]
    # Position length + j turns by the one, then by the other.
    (now_cos, later_cos), (now_sin, later_sin) = (
        (table[length].double(), table[:num_future].double().mean(0)) for table in rope
    )
    turn = now_cos * later_cos - now_sin * later_sin, now_sin * later_cos + now_cos * later_sin
    mean = raw.mean(2, keepdim=True)
    centred = _rotate(raw - mean, *turn).mT / (2 * dim * len(queries)) ** 0.5
    mean = _rotate(mean, *turn).mT / dim**0.5
    parts = []
    for block in keys.split(_BLOCK, dim=1):
        wide = block.double()[:, None]
        exponent = (wide @ mean)[..., 0]
        parts.append(exponent + (wide @ centred).square().sum(-1) if with_covariance else exponent)
    return torch.cat(parts, dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[..., d]``: element i and i + d/2 are the two sides of a plane."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
