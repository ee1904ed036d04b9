"""The rotation of vectors before they are rounded: Hadamard matrices spread an outlier over a block of numbers."""

import torch
from torch import Tensor


def block_size(dim: int, largest: int | None = None) -> int:
    """Return how many numbers are rotated together: the largest power of two that divides `dim`, at most `largest`."""
    size = dim & -dim
    return size if largest is None else min(size, largest)


def rotate_blocks(x: Tensor, largest: int | None = None) -> Tensor:
    """Return `x` `[..., dim]` times the normed Hadamard matrix of each block, in Sylvester's order: float32.

    The matrix is symmetric and its own inverse, so twice is the identity up to rounding. Pairs are added by strides
    1, 2, 4, … and the sums multiplied once at the end: every backend keeps this order, so that bits agree.
    """
    size, stride, rotated = block_size(x.shape[-1], largest), 1, x.float()
    while stride < size:
        first, second = rotated.unflatten(-1, (-1, 2, stride)).unbind(-2)
        rotated = torch.stack((first + second, first - second), -2).flatten(-3)
        stride *= 2
    return rotated * size**-0.5
