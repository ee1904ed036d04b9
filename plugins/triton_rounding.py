"""Conversions to the 8-bit cache formats inside Triton kernels, as `plugins.kv_quantization` defines them."""

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(2.0**-126)
# Adding and subtracting it rounds a float32 below 2**22 to an integer, half to even.
_ROUNDING = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def quantize(x, scale, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """float32 `x / scale`, saturated to +-LARGEST and rounded half to even; NaN stays NaN in e4m3, int8 has 0."""
    scaled = tl.div_rn(x, scale)
    if dtype == tl.int8:
        scaled = tl.where(scaled == scaled, scaled, 0.0)
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        scaled = (scaled + _ROUNDING) - _ROUNDING
    else:
        scaled = tl.maximum(scaled, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.minimum(scaled, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(dtype)


@triton.jit
def row_scale(magnitude, LARGEST: tl.constexpr):
    """The scale of each row of absolute values [rows, columns]: [rows], NaN where the row has one."""
    has_nan = tl.max((magnitude != magnitude).to(tl.int32), axis=1) > 0
    scale = tl.maximum(tl.div_rn(tl.max(magnitude, axis=1), tl.full([1], LARGEST, tl.float32)), SMALLEST_SCALE)
    return tl.where(has_nan, float("nan"), scale)
