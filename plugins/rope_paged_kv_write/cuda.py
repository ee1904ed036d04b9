"""RopePagedKvWrite in Triton: one program per token, all its heads."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.errors import PluginError
from plugins.kv_quantization import INT4
from plugins.kv_rotation import rotate_blocks
from plugins.rope_paged_kv_write.reference import at_positions
from plugins.triton_cache import PoolLayout, capability_of, check_capability, layout_of
from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel
from plugins.triton_rounding import quantize, row_scale


@triton.jit
def _larger_magnitude(x, y):
    return tl.maximum(tl.abs(x), tl.abs(y), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store(pool, first, second, scale, offset, mask, HALF: tl.constexpr, LARGEST: tl.constexpr):
    """Writes the two halves [heads, head_dim/2] of a token's heads; of int4 the even and the odd numbers, in pairs."""
    if pool.dtype.element_ty == tl.uint8:
        even = quantize(first, scale, LARGEST, tl.int8).to(tl.int32)
        odd = quantize(second, scale, LARGEST, tl.int8).to(tl.int32)
        tl.store(pool + offset, ((even & 15) | ((odd & 15) << 4)).to(tl.uint8), mask)
    else:
        if LARGEST is not None:
            first = quantize(first, scale, LARGEST, pool.dtype.element_ty)
            second = quantize(second, scale, LARGEST, pool.dtype.element_ty)
        tl.store(pool + offset, first.to(pool.dtype.element_ty), mask)
        tl.store(pool + offset + HALF, second.to(pool.dtype.element_ty), mask)


@triton.jit
def rope_paged_kv_write_kernel(
    k,
    v,
    cos,
    sin,
    slot_mapping,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    num_tokens,
    k_pool_out,
    v_pool_out,
    k_scales_out,
    v_scales_out,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALES_PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
):
    # A tensor updated in place is two arguments of one address. It is written through the input: whether TensorRT
    # passes an aliased output to a kernel is not documented. A graph of torch gives the output alone.
    if k_pool is None:
        k_pool = k_pool_out
        v_pool = v_pool_out
    if k_scales is None:
        k_scales = k_scales_out
        v_scales = v_scales_out
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_BLOCK)
    column = tl.arange(0, HALF_BLOCK)
    mask = (head < KV_HEADS)[:, None] & (column < HALF)[None, :]
    offset = head[:, None] * HEAD_DIM + column[None, :]
    k_row = k + token.to(tl.int64) * K_STRIDE
    v_row = v + token.to(tl.int64) * V_STRIDE
    k_first = tl.load(k_row + offset, mask, other=0.0).to(tl.float32)
    k_second = tl.load(k_row + offset + HALF, mask, other=0.0).to(tl.float32)
    v_first = tl.load(v_row + offset, mask, other=0.0).to(tl.float32)
    v_second = tl.load(v_row + offset + HALF, mask, other=0.0).to(tl.float32)
    angle = token * HALF + column
    c = tl.load(cos + angle, column < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, column < HALF, other=0.0)[None, :]
    IN_PAIRS: tl.constexpr = k_pool.dtype.element_ty == tl.uint8
    if IN_PAIRS:  # K comes rotated
        first = k_first
        second = k_second
    else:
        first = k_first * c - k_second * s
        second = k_second * c + k_first * s

    page = (slot // PAGE_SIZE).to(tl.int64)
    in_page = slot % PAGE_SIZE
    k_scale = tl.full([1, 1], K_SCALE, tl.float32)
    v_scale = tl.full([1, 1], V_SCALE, tl.float32)
    if k_scales is not None:
        k_scales_row = row_scale(_larger_magnitude(first, second), LARGEST)
        v_scales_row = row_scale(_larger_magnitude(v_first, v_second), LARGEST)
        place = page * SCALES_PAGE_STRIDE + in_page * KV_HEADS + head
        tl.store(k_scales + place, k_scales_row, head < KV_HEADS)
        tl.store(v_scales + place, v_scales_row, head < KV_HEADS)
        k_scale = k_scales_row[:, None]
        v_scale = v_scales_row[:, None]
    STORED_DIM: tl.constexpr = HALF if IN_PAIRS else HEAD_DIM
    offset = head[:, None] * STORED_DIM + column[None, :] + page * PAGE_STRIDE + in_page * (KV_HEADS * STORED_DIM)
    _store(k_pool, first, second, k_scale, offset, mask, HALF, LARGEST)
    _store(v_pool, v_first, v_second, v_scale, offset, mask, HALF, LARGEST)


def kernel_spec(cache: PoolLayout, dtype: torch.dtype, k_stride: int = 0, v_stride: int = 0) -> KernelSpec:
    """The kernel for K and V of `dtype`; strides are elements from token to token (default: contiguous)."""
    width = cache.kv_heads * cache.head_dim
    pools = [("k_pool", cache.dtype), ("v_pool", cache.dtype)]
    scales = [("k_scales", torch.float32), ("v_scales", torch.float32)]
    in_place = pools + scales if cache.dynamic else pools
    absent = [] if cache.dynamic else [(name + end, None) for end in ("", "_out") for name, _ in scales]
    return KernelSpec(
        name="rope_paged_kv_write",
        function=rope_paged_kv_write_kernel,
        inputs=(
            Pointer("k", dtype),
            Pointer("v", dtype),
            Pointer("cos", torch.float32),
            Pointer("sin", torch.float32),
            Pointer("slot_mapping", torch.int32),
            *(Pointer(name, kind) for name, kind in in_place),
        ),
        sizes=(Size("num_tokens", "slot_mapping", 0),),
        outputs=tuple(Pointer(name + "_out", kind) for name, kind in in_place),
        constants=(
            *absent,
            ("K_STRIDE", k_stride or width),
            ("V_STRIDE", v_stride or width),
            ("PAGE_SIZE", cache.page_size),
            ("PAGE_STRIDE", cache.page_stride),
            ("SCALES_PAGE_STRIDE", cache.scales_page_stride),
            ("KV_HEADS", cache.kv_heads),
            ("HEAD_DIM", cache.head_dim),
            ("HEADS_BLOCK", triton.next_power_of_2(cache.kv_heads)),
            ("HALF_BLOCK", triton.next_power_of_2(cache.head_dim // 2)),
            ("LARGEST", cache.largest),
            ("K_SCALE", cache.k_scale),
            ("V_SCALE", cache.v_scale),
        ),
        grid=lambda sizes: (sizes["num_tokens"], 1, 1),
        num_warps=4,
    )


def _evens_first(x: Tensor) -> Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def launch(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    rotates_keys: bool = False,
    *,
    wrap: Callable[[Any], Any] | None = None,
) -> None:
    """Same arguments as `plugins.rope_paged_kv_write`, on the GPU; `wrap` as in `plugins.triton_kernel.run_kernel`.

    Raises PluginError for rotated keys, dtypes, strides or a GPU that the kernel cannot serve; values are not checked.
    """
    if rotates_keys:
        raise PluginError("rope_paged_kv_write rotates no keys in int8 on a GPU; build the engine for a GPU.")
    k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
    cache = layout_of(k_pool, v_pool, k_scales, v_scales, k_scale, v_scale)
    check_capability(cache.dtype, capability_of(k_pool))
    if cache.dtype == INT4:
        k, v = _evens_first(rotate_blocks(at_positions(k, cos, sin))), _evens_first(rotate_blocks(v))
    tensors = {"k": k, "v": v, "cos": cos, "sin": sin, "slot_mapping": slot_mapping}
    pools = {"k_pool": k_pool, "v_pool": v_pool}
    if k_scales is not None and v_scales is not None:
        pools |= {"k_scales": k_scales, "v_scales": v_scales}
    tensors |= pools | {name + "_out": tensor for name, tensor in pools.items()}
    run_kernel(kernel_spec(cache, k.dtype, k.stride(0), v.stride(0)), tensors, wrap)
