"""The definition of ScaledAdd in plain torch."""

from torch import Tensor


def reference(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """x + scale * y for float32 tensors of one shape, in float32.

    Raises RuntimeError on another dtype and on shapes that differ.
    """
    return x + scale * y
