"""SelectedKvWrite in Triton: one program per sequence, KV head and tile; those behind the last chunk return."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.errors import PluginError
from plugins.low_rank_key_reconstruct.cuda import blocks, listed_tokens, rebuilt_halves
from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel

_INT32 = ("slot", "chunks", "places", "shadow_table", "page_table")
_INPUTS = ("u", "sv", "host_v", *_INT32, "cos", "sin", "k_pool", "v_pool")


@triton.jit
def selected_kv_write_kernel(
    u,
    sv,
    host_v,
    slot,
    chunks,
    places,
    shadow_table,
    page_table,
    cos,
    sin,
    k_pool,
    v_pool,
    num_sequences,
    shadow_width,
    page_width,
    k_pool_out,
    v_pool_out,
    K_PAGE: tl.constexpr,
    V_PAGE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    if k_pool is None:  # a graph of torch gives what is updated in place as the output alone
        k_pool = k_pool_out
        v_pool = v_pool_out
    HALF: tl.constexpr = HEAD_DIM // 2
    begin = tl.program_id(0) * TILE
    head = tl.program_id(1)
    s = tl.program_id(2)
    own = tl.load(slot + s).to(tl.int64)
    list_start = (s.to(tl.int64) * KV_HEADS + head) * PLACES
    if (own < 0) | (tl.load(chunks + list_start + begin // CHUNK_SIZE) < 0):
        return
    token = begin + tl.arange(0, TILE)
    table = shadow_table + s.to(tl.int64) * shadow_width
    found, position, row = listed_tokens(chunks + list_start, table, token, PAGE_SIZE, CHUNK_SIZE, PLACES)
    index, inside = token // CHUNK_SIZE, token % CHUNK_SIZE
    place = tl.load(places + list_start + index, found, other=0) * CHUNK_SIZE + inside
    page = tl.load(page_table + s.to(tl.int64) * page_width + place // PAGE_SIZE, found, other=0).to(tl.int64)
    column = tl.arange(0, HALF_BLOCK)
    mask = found[:, None] & (column < HALF)[None, :]
    # Values may be in the host's memory: they are on their way while keys are rebuilt.
    source = host_v + (row * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    low_value = tl.load(source, mask)
    high_value = tl.load(source + HALF, mask)
    factor = sv + (own * KV_HEADS + head) * (RANK * HEAD_DIM)
    low, high = rebuilt_halves(
        u + row * RANK, factor, found, position, cos, sin, RANK, HEAD_DIM, BLOCK_RANK, HALF_BLOCK, TILE
    )
    element = ((place % PAGE_SIZE) * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    key = k_pool + page[:, None] * K_PAGE + element
    value = v_pool + page[:, None] * V_PAGE + element
    tl.store(key, low.to(k_pool.dtype.element_ty), mask)
    tl.store(key + HALF, high.to(k_pool.dtype.element_ty), mask)
    tl.store(value, low_value, mask)
    tl.store(value + HALF, high_value, mask)


def kernel_spec(
    dtype: torch.dtype,
    page_size: int,
    chunk_size: int,
    places: int,
    kv_heads: int,
    rank: int,
    head_dim: int,
    k_page: int = 0,
    v_page: int = 0,
) -> KernelSpec:
    """The kernel for tensors of `dtype`, of which the pools have k_page and v_page elements from page to page
    (default: contiguous) and all others are contiguous. Raises PluginError for another dtype than the three."""
    types = {name: torch.int32 for name in _INT32} | {"cos": torch.float32, "sin": torch.float32}
    constants = blocks(dtype, head_dim)
    tiles = -(-places * chunk_size // constants["TILE"])
    return KernelSpec(
        name="selected_kv_write",
        function=selected_kv_write_kernel,
        inputs=tuple(Pointer(name, types.get(name, dtype)) for name in _INPUTS),
        sizes=(
            Size("num_sequences", "slot", 0),
            Size("shadow_width", "shadow_table", 1),
            Size("page_width", "page_table", 1),
        ),
        outputs=(Pointer("k_pool_out", dtype), Pointer("v_pool_out", dtype)),
        constants=(
            ("K_PAGE", k_page or page_size * kv_heads * head_dim),
            ("V_PAGE", v_page or page_size * kv_heads * head_dim),
            ("PAGE_SIZE", page_size),
            ("CHUNK_SIZE", chunk_size),
            ("PLACES", places),
            ("KV_HEADS", kv_heads),
            ("RANK", rank),
            ("HEAD_DIM", head_dim),
            *constants.items(),
        ),
        grid=lambda sizes: (tiles, kv_heads, sizes["num_sequences"]),
        num_warps=4,
    )


def launch(
    u: Tensor,
    sv: Tensor,
    host_v: Tensor,
    slot: Tensor,
    chunks: Tensor,
    places: Tensor,
    shadow_table: Tensor,
    page_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    chunk_size: int,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    wrap: Callable[[Any], Any] | None = None,
) -> None:
    """Same arguments as `plugins.selected_kv_write`, on the GPU; `host_v` may be in pinned host memory.

    wrap: as in `plugins.triton_kernel.run_kernel`. Raises PluginError for pools or host values whose pages are not
    contiguous; values are not checked.
    """
    _, page_size, kv_heads, head_dim = k_pool.shape
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.stride()[1:] != (kv_heads * head_dim, head_dim, 1):
            raise PluginError(f"Each page of {name} must be contiguous; allocate the pools as the runtime does.")
    if not host_v.is_contiguous():
        raise PluginError("host_v must be contiguous; allocate it as the runtime does.")
    given = (u, sv, host_v, slot, chunks, places, shadow_table, page_table, cos, sin)
    tensors = dict(zip(_INPUTS, (tensor.contiguous() for tensor in given), strict=False))
    tensors |= {"k_pool": k_pool, "v_pool": v_pool, "k_pool_out": k_pool, "v_pool_out": v_pool}
    shape = (page_size, chunk_size, chunks.shape[2], kv_heads, u.shape[2], head_dim)
    run_kernel(kernel_spec(k_pool.dtype, *shape, k_pool.stride(0), v_pool.stride(0)), tensors, wrap)
