"""The second step of SelectedKvWrite in Triton, where another kernel rebuilt the keys: these and values from host
memory are copied to their places; one program per tile of a list, KV head and sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.low_rank_key_reconstruct import cuda as reconstruct
from plugins.selected_kv_write.functional import PLACED
from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel

_FLOATS = ("keys", "host_v", "k_pool", "v_pool")
_TILE = 64


@triton.jit
def selected_kv_place_kernel(
    keys,
    host_v,
    slot,
    chunks,
    places,
    shadow_table,
    page_table,
    k_pool,
    v_pool,
    num_sequences,
    shadow_width,
    page_width,
    k_pool_out,
    v_pool_out,
    PAGE_SIZE: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    begin = tl.program_id(0) * TILE
    head = tl.program_id(1)
    s = tl.program_id(2)
    list_start = (s.to(tl.int64) * KV_HEADS + head) * PLACES
    if (tl.load(slot + s) < 0) | (tl.load(chunks + list_start + begin // CHUNK_SIZE) < 0):
        return
    token = begin + tl.arange(0, TILE)
    table = shadow_table + s.to(tl.int64) * shadow_width
    found, _, row = reconstruct.listed_tokens(chunks + list_start, table, token, PAGE_SIZE, CHUNK_SIZE, PLACES)
    place = tl.load(places + list_start + token // CHUNK_SIZE, found, other=0) * CHUNK_SIZE + token % CHUNK_SIZE
    page = tl.load(page_table + s.to(tl.int64) * page_width + place // PAGE_SIZE, found, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)
    mask = found[:, None] & (column < HEAD_DIM)[None, :]
    value = tl.load(host_v + (row * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :], mask)
    key = tl.load(keys + (list_start * CHUNK_SIZE + token)[:, None] * HEAD_DIM + column[None, :], mask)
    target = ((page * PAGE_SIZE + place % PAGE_SIZE) * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(k_pool + target, key, mask)
    tl.store(v_pool + target, value, mask)


def place_spec(
    dtype: torch.dtype, page_size: int, chunk_size: int, places: int, kv_heads: int, head_dim: int
) -> KernelSpec:
    """The kernel for keys, values and pools of `dtype`, all contiguous."""
    tiles = -(-places * chunk_size // _TILE)
    return KernelSpec(
        name="selected_kv_place",
        function=selected_kv_place_kernel,
        inputs=tuple(Pointer(name, dtype if name in _FLOATS else torch.int32) for name in PLACED),
        sizes=(
            Size("num_sequences", "slot", 0),
            Size("shadow_width", "shadow_table", 1),
            Size("page_width", "page_table", 1),
        ),
        outputs=(Pointer("k_pool_out", dtype), Pointer("v_pool_out", dtype)),
        constants=(
            ("PAGE_SIZE", page_size),
            ("CHUNK_SIZE", chunk_size),
            ("PLACES", places),
            ("KV_HEADS", kv_heads),
            ("HEAD_DIM", head_dim),
            ("BLOCK_DIM", triton.next_power_of_2(head_dim)),
            ("TILE", _TILE),
        ),
        grid=lambda sizes: (tiles, kv_heads, sizes["num_sequences"]),
        num_warps=4,
    )


def launch_in_steps(
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
) -> None:
    """Same arguments as `plugins.selected_kv_write`, contiguous, by the two kernels that TensorRT's plans start."""
    keys = reconstruct.launch(u, sv, slot, chunks, shadow_table, cos, sin, chunk_size)
    given = (keys, host_v, slot, chunks, places, shadow_table, page_table, k_pool, v_pool)
    tensors = dict(zip(PLACED, given, strict=True)) | {"k_pool_out": k_pool, "v_pool_out": v_pool}
    _, page_size, kv_heads, head_dim = k_pool.shape
    run_kernel(place_spec(k_pool.dtype, page_size, chunk_size, chunks.shape[2], kv_heads, head_dim), tensors)
