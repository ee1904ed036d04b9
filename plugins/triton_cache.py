"""What the Triton kernels know of a KV cache at compile time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.errors import PluginError
from plugins.kv_quantization import INT4, LARGEST, stored_dim

FP8_CAPABILITY = 89
"""The first compute capability (major * 10 + minor) that converts e4m3 in hardware."""


@dataclass(frozen=True)
class PoolLayout:
    """The pools of one owner: K and V alike, [pages, page_size, kv_heads, stored_dim], each page contiguous.

    `dynamic`: 8-bit pools with scales per token and head; otherwise `k_scale` and `v_scale` hold for all of K and V.
    Strides are elements from one page to the next; the defaults are those of contiguous tensors.
    Raises PluginError when the scales do not fit the dtype.
    """

    dtype: torch.dtype
    page_size: int
    kv_heads: int
    head_dim: int
    dynamic: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    page_stride: int = 0
    scales_page_stride: int = 0

    def __post_init__(self) -> None:
        rows = self.page_size * self.kv_heads
        object.__setattr__(self, "page_stride", self.page_stride or rows * self.stored_dim)
        object.__setattr__(self, "scales_page_stride", self.scales_page_stride or rows)
        scaled = self.dynamic or (self.k_scale, self.v_scale) != (1.0, 1.0)
        if scaled and self.dtype not in LARGEST:
            raise PluginError(f"Pools of {self.dtype} take no scales; use float8_e4m3fn or int8 pools, or drop them.")

    @property
    def largest(self) -> float | None:
        """The largest stored magnitude of a quantized cache."""
        return LARGEST.get(self.dtype)

    @property
    def stored_dim(self) -> int:
        """The elements of a head: bytes of two numbers for int4."""
        return stored_dim(self.head_dim, self.dtype)


def layout_of(
    k_pool: Tensor,
    v_pool: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    k_scale: float,
    v_scale: float,
) -> PoolLayout:
    """The layout of these tensors; raises PluginError when the Triton kernels cannot address them."""
    _, page_size, kv_heads, stored = k_pool.shape
    page = (kv_heads * stored, stored, 1)
    if v_pool.dtype != k_pool.dtype or v_pool.shape[1:] != k_pool.shape[1:]:
        raise PluginError("k_pool and v_pool must have the same dtype and shape.")
    if k_pool.stride() != v_pool.stride() or k_pool.stride()[1:] != page:
        raise PluginError("k_pool and v_pool must have the same strides and contiguous pages.")
    if (k_scales is None) != (v_scales is None):
        raise PluginError("Give both k_scales and v_scales, or neither.")
    scales_page_stride = 0
    if k_scales is not None and v_scales is not None:
        if k_scales.stride() != v_scales.stride() or k_scales.stride()[1:] != (kv_heads, 1):
            raise PluginError("k_scales and v_scales must have the same strides and contiguous pages.")
        scales_page_stride = k_scales.stride(0)
    return PoolLayout(
        k_pool.dtype,
        page_size,
        kv_heads,
        2 * stored if k_pool.dtype == INT4 else stored,
        k_scales is not None,
        k_scale,
        v_scale,
        k_pool.stride(0),
        scales_page_stride,
    )


def check_capability(dtype: torch.dtype, capability: int) -> None:
    """Raises PluginError when the kernels cannot read a cache of `dtype` on this compute capability (90: 9.0)."""
    if dtype == torch.float8_e4m3fn and capability < FP8_CAPABILITY:
        raise PluginError(
            f"An FP8 KV cache needs compute capability 8.9, and this is {capability // 10}.{capability % 10}; "
            "use an int8 or bfloat16 cache."
        )


def capability_of(tensor: Tensor) -> int:
    """Compute capability of the tensor's GPU (90: 9.0), and 90 without one."""
    if not (tensor.is_cuda and torch.cuda.is_available()):
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return major * 10 + minor
