"""LowRankKeyReconstruct in Triton: one program per tile of selections and KV head. `selected_kv_write` rebuilds its
keys with the same function."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.errors import PluginError
from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel
from plugins.triton_search import find_sequence, num_tiles

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    selected_start,
    rows,
    positions,
    cos,
    sin,
    num_selected,
    num_sequences,
    out,
    KV_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s = find_sequence(selected_start, num_sequences, tile, TILE)
    begin = tl.load(selected_start + s)
    end = tl.load(selected_start + s + 1)
    begin += (tile - begin // TILE - s) * TILE
    if begin >= end:
        return
    selected = begin + tl.arange(0, TILE)
    present = selected < end
    row = tl.load(rows + selected * KV_HEADS + head, present, other=-1)
    found = row >= 0
    position = tl.load(positions + selected * KV_HEADS + head, found, other=0)
    u_row = u + row.to(tl.int64) * RANK
    factor = sv + (s.to(tl.int64) * KV_HEADS + head) * (RANK * HEAD_DIM)
    first, second = rebuilt_halves(
        u_row, factor, found, position, cos, sin, RANK, HEAD_DIM, BLOCK_RANK, HALF_BLOCK, TILE
    )
    column = tl.arange(0, HALF_BLOCK)
    target = out + (selected.to(tl.int64) * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    mask = present[:, None] & (column < HALF)[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask)
    tl.store(target + HALF, second.to(out.dtype.element_ty), mask)


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


def kernel_spec(dtype: torch.dtype, kv_heads: int, rank: int, head_dim: int) -> KernelSpec:
    """The kernel for u and sv of `dtype`; all tensors are contiguous. Raises PluginError for another dtype."""
    constants = blocks(dtype, head_dim)
    return KernelSpec(
        name="low_rank_key_reconstruct",
        function=low_rank_key_reconstruct_kernel,
        inputs=(
            Pointer("u", dtype),
            Pointer("sv", dtype),
            Pointer("selected_start", torch.int32),
            Pointer("rows", torch.int32),
            Pointer("positions", torch.int32),
            Pointer("cos", torch.float32),
            Pointer("sin", torch.float32),
        ),
        sizes=(Size("num_selected", "rows", 0), Size("num_sequences", "sv", 0)),
        outputs=(Pointer("out", dtype),),
        constants=(
            ("KV_HEADS", kv_heads),
            ("RANK", rank),
            ("HEAD_DIM", head_dim),
            *constants.items(),
        ),
        grid=lambda sizes: (num_tiles(sizes["num_selected"], sizes["num_sequences"], constants["TILE"]), kv_heads, 1),
        num_warps=4,
    )


def launch(
    u: Tensor,
    sv: Tensor,
    selected_start: Tensor,
    rows: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    wrap: Callable[[Any], Any] | None = None,
) -> Tensor:
    """Same arguments and result as `plugins.low_rank_key_reconstruct`, on the GPU; float16 works as well.

    wrap: as in `plugins.triton_kernel.run_kernel`.
    """
    _, kv_heads, rank, head_dim = sv.shape
    out = u.new_empty((rows.shape[0], kv_heads, head_dim))
    tensors = {
        "u": u.contiguous(),
        "sv": sv.contiguous(),
        "selected_start": selected_start,
        "rows": rows.contiguous(),
        "positions": positions.contiguous(),
        "cos": cos.contiguous(),
        "sin": sin.contiguous(),
        "out": out,
    }
    run_kernel(kernel_spec(u.dtype, kv_heads, rank, head_dim), tensors, wrap)
    return out
