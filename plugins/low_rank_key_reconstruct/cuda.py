"""LowRankKeyReconstruct in Triton: one program per tile of a list, KV head and sequence; those behind the list's end
return. `selected_kv_write` rebuilds its keys with the same functions."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.errors import PluginError
from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INT32 = ("slot", "chunks", "shadow_table")
_INPUTS = ("u", "sv", *_INT32, "cos", "sin")


@triton.jit
def listed_tokens(chunks, table, token, PAGE_SIZE: tl.constexpr, CHUNK_SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Of each token of a list whether it is there, its position, and its row in what has pages of this table."""
    chunk = tl.load(chunks + token // CHUNK_SIZE, token < PLACES * CHUNK_SIZE, other=-1)
    found = chunk >= 0
    position = tl.where(found, chunk * CHUNK_SIZE + token % CHUNK_SIZE, 0)
    page = tl.load(table + position // PAGE_SIZE, found, other=0)
    return found, position, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def rebuilt_halves(
    u_row,
    factor,
    found,
    position,
    cos,
    sin,
    RANK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Both halves of TILE rotated keys, float32: pointers to rows of u, to one head's sv; 0 where not found."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HALF_BLOCK)
    inner = tl.arange(0, BLOCK_RANK)
    low = tl.zeros([TILE, HALF_BLOCK], tl.float32)
    high = tl.zeros([TILE, HALF_BLOCK], tl.float32)
    for r in tl.range(0, RANK, BLOCK_RANK):
        k = r + inner
        left = tl.load(u_row[:, None] + k[None, :], found[:, None] & (k < RANK)[None, :], other=0.0)
        mask = (k < RANK)[:, None] & (column < HALF)[None, :]
        place = factor + k[:, None] * HEAD_DIM + column[None, :]
        low = tl.dot(left, tl.load(place, mask, other=0.0), low, input_precision="ieee")
        high = tl.dot(left, tl.load(place + HALF, mask, other=0.0), high, input_precision="ieee")
    angle = position.to(tl.int64)[:, None] * HALF + column[None, :]
    mask = found[:, None] & (column < HALF)[None, :]
    c = tl.load(cos + angle, mask, other=0.0)
    d = tl.load(sin + angle, mask, other=0.0)
    return low * c - high * d, high * c + low * d


@triton.jit
def low_rank_key_reconstruct_kernel(
    u,
    sv,
    slot,
    chunks,
    shadow_table,
    cos,
    sin,
    num_sequences,
    shadow_width,
    out,
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
    factor = sv + (own * KV_HEADS + head) * (RANK * HEAD_DIM)
    low, high = rebuilt_halves(
        u + row * RANK, factor, found, position, cos, sin, RANK, HEAD_DIM, BLOCK_RANK, HALF_BLOCK, TILE
    )
    column = tl.arange(0, HALF_BLOCK)
    key = out + (list_start * CHUNK_SIZE + token)[:, None] * HEAD_DIM + column[None, :]
    mask = found[:, None] & (column < HALF)[None, :]
    tl.store(key, low.to(out.dtype.element_ty), mask)
    tl.store(key + HALF, high.to(out.dtype.element_ty), mask)


def blocks(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """The constants BLOCK_RANK, HALF_BLOCK and TILE. Raises PluginError for another dtype than the three."""
    if dtype not in _DTYPES:
        raise PluginError(f"u must be float32, float16 or bfloat16, not {dtype}.")
    half_block = max(16, triton.next_power_of_2(head_dim // 2))
    return {
        "BLOCK_RANK": 16 if dtype == torch.float32 else 32,
        "HALF_BLOCK": half_block,
        "TILE": 32 if dtype == torch.float32 or half_block > 128 else 64,
    }


def kernel_spec(
    dtype: torch.dtype, page_size: int, chunk_size: int, places: int, kv_heads: int, rank: int, head_dim: int
) -> KernelSpec:
    """The kernel for u and sv of `dtype` and lists of `places` chunks; all tensors are contiguous. Raises PluginError
    for another dtype."""
    types = {name: torch.int32 for name in _INT32} | {"cos": torch.float32, "sin": torch.float32}
    constants = blocks(dtype, head_dim)
    tiles = -(-places * chunk_size // constants["TILE"])
    return KernelSpec(
        name="low_rank_key_reconstruct",
        function=low_rank_key_reconstruct_kernel,
        inputs=tuple(Pointer(name, types.get(name, dtype)) for name in _INPUTS),
        sizes=(Size("num_sequences", "slot", 0), Size("shadow_width", "shadow_table", 1)),
        outputs=(Pointer("out", dtype),),
        constants=(
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
    slot: Tensor,
    chunks: Tensor,
    shadow_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    chunk_size: int,
    *,
    wrap: Callable[[Any], Any] | None = None,
) -> Tensor:
    """Same arguments and result as `plugins.low_rank_key_reconstruct`, on the GPU; float16 works as well.

    wrap: as in `plugins.triton_kernel.run_kernel`. Values are not checked.
    """
    (_, page_size, rank), (sequences, kv_heads, places), head_dim = u.shape, chunks.shape, sv.shape[3]
    given = (u, sv, slot, chunks, shadow_table, cos, sin)
    tensors = dict(zip(_INPUTS, (tensor.contiguous() for tensor in given), strict=True))
    tensors["out"] = u.new_empty((sequences, kv_heads, places * chunk_size, head_dim))
    run_kernel(kernel_spec(u.dtype, page_size, chunk_size, places, kv_heads, rank, head_dim), tensors, wrap)
    return tensors["out"]
