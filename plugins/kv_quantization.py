"""The 8-bit formats of the KV cache: e4m3 and int8, with one scale per token and head or one per layer.

KV quantization as in arXiv 2410.03960, section 4.4 (per token), and static scales as ModelOpt exports them.
"""

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest magnitude of each 8-bit cache dtype."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: a row of zeros gets this scale, and no division overflows."""


def quantize(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `x / scale` (float32, IEEE division) saturated to `dtype` and rounded half to even.

    A NaN stays NaN in e4m3 and becomes 0 in int8, where only the scale can show it.
    """
    limit = LARGEST[dtype]
    scaled = (x.float() / scale).clamp(-limit, limit)
    return scaled.to(dtype) if dtype == torch.float8_e4m3fn else scaled.nan_to_num(0.0).round().to(dtype)


def dynamic_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float32 scale of each row of `x` `[..., head_dim]`: `[...]`, not finite if the row is not."""
    return (x.float().abs().amax(-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)


def dequantize(x: Tensor, scales: Tensor | None, scale: float = 1.0) -> Tensor:
    """Return the float32 numbers that `x` `[..., head_dim]` of a cache stands for: those of float dtypes as they are,
    8-bit ones times the `scales` `[...]` of their rows, or times `scale` without."""
    if x.dtype not in LARGEST:
        return x.float()
    return x.float() * (scale if scales is None else scales[..., None])
