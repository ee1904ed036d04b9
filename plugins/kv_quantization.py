"""The formats of the KV cache in 8 and 4 bits: e4m3, int8 and int4, with one scale per token and head or one per layer.

KV quantization as in arXiv 2410.03960, section 4.4 (per token), and static scales as ModelOpt exports them. A pool of
int4 is of uint8 and holds heads rotated by `plugins.kv_rotation`.
"""

import torch
from torch import Tensor

INT4 = torch.uint8
"""The dtype of a pool with two numbers in a byte: the even one in its lower half, both in two's complement."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, INT4: 7.0}
"""The largest magnitude of each quantized cache dtype."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: a row of zeros gets this scale, and no division overflows."""


def stored_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Return the last dimension of a pool of `dtype` with heads of `head_dim` numbers, an even one."""
    return head_dim // 2 if dtype == INT4 else head_dim


def quantize(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `x / scale` (float32, IEEE division) saturated to `dtype` and rounded half to even; of int4 the pairs.

    A NaN stays NaN in e4m3 and becomes 0 in integers, where only the scale can show it.
    """
    limit = LARGEST[dtype]
    scaled = (x.float() / scale).clamp(-limit, limit)
    if dtype == torch.float8_e4m3fn:
        return scaled.to(dtype)
    codes = scaled.nan_to_num(0.0).round().to(torch.int8)
    return _in_pairs(codes) if dtype == INT4 else codes


def dynamic_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float32 scale of each row of `x` `[..., head_dim]`: `[...]`, not finite if the row is not."""
    return (x.float().abs().amax(-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)


def dequantize(x: Tensor, scales: Tensor | None, scale: float = 1.0) -> Tensor:
    """Return the float32 numbers that `x` `[..., stored_dim]` of a cache stands for: those of float dtypes as they are,
    quantized ones times the `scales` `[...]` of their rows, or times `scale` without; of int4 the rotated ones."""
    if x.dtype not in LARGEST:
        return x.float()
    numbers = _out_of_pairs(x) if x.dtype == INT4 else x
    return numbers.float() * (scale if scales is None else scales[..., None])


def _in_pairs(codes: Tensor) -> Tensor:
    even, odd = codes.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (even & 15) | (odd << 4)


def _out_of_pairs(pairs: Tensor) -> Tensor:
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int8)
    return torch.where(codes > 7, codes - 16, codes)
