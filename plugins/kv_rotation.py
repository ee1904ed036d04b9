"""The rotation of cached vectors: a Hadamard matrix over head_dim, which spreads an outlier over a head's numbers."""

import torch
from torch import Tensor


def block_size(head_dim: int) -> int:
    """Return how many numbers are rotated together: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def rotate_heads(x: Tensor) -> Tensor:
    """Return `x` `[..., head_dim]` times the normed Hadamard matrix of each block, in Sylvester's order: float32.

    The matrix is symmetric and its own inverse, so twice is the identity up to rounding. Pairs are added by strides
    1, 2, 4, … and the sums multiplied once at the end: every backend keeps this order, so that bits agree.
    """
    size, stride, rotated = block_size(x.shape[-1]), 1, x.float()
    while stride < size:
        first, second = rotated.unflatten(-1, (-1, 2, stride)).unbind(-2)
        rotated = torch.stack((first + second, first - second), -2).flatten(-3)
        stride *= 2
    return rotated * size**-0.5
