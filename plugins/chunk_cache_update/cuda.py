"""ChunkCacheUpdate in Triton: one program per sequence and KV head."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel

_STEP = tl.constexpr(16)  # selected chunks that are compared with all places at once


@triton.jit
def chunk_cache_update_kernel(
    selected,
    cached,
    slot,
    shadow_table,
    page_table,
    num_sequences,
    shadow_width,
    page_width,
    cached_out,
    rows,
    positions,
    targets,
    KV_HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if cached is None:  # a graph of torch gives what is updated in place as the output alone
        cached = cached_out
    s = tl.program_id(0)
    head = tl.program_id(1)
    own = tl.load(slot + s)
    place = tl.arange(0, BLOCK)
    inside = place < PLACES
    held_at = cached + (tl.maximum(own, 0).to(tl.int64) * KV_HEADS + head) * PLACES + place
    held = tl.load(held_at, inside & (own >= 0), other=-1)
    wanted_at = selected + (s.to(tl.int64) * KV_HEADS + head) * PLACES
    step = tl.arange(0, _STEP)
    hits = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, PLACES, _STEP):
        chunk = tl.load(wanted_at + first + step, first + step < PLACES, other=-1)
        same = (held[:, None] == chunk[None, :]) & (chunk >= 0)[None, :]
        hits = tl.maximum(hits, tl.max(same.to(tl.int32), axis=1))
    free = inside & (hits == 0)
    free_rank = tl.cumsum(free.to(tl.int32), axis=0)
    brought = place * 0 - 1
    num_missed = own * 0
    for first in tl.range(0, PLACES, _STEP):
        chunk = tl.load(wanted_at + first + step, (first + step < PLACES) & (own >= 0), other=-1)
        same = (held[:, None] == chunk[None, :]).to(tl.int32)
        missed = ((tl.max(same, axis=0) == 0) & (chunk >= 0)).to(tl.int32)
        rank = num_missed + tl.cumsum(missed, axis=0)
        match = free[:, None] & (missed == 1)[None, :] & (free_rank[:, None] == rank[None, :])
        brought = tl.maximum(brought, tl.max(tl.where(match, chunk[None, :], -1), axis=1))
        num_missed += tl.sum(missed, axis=0)
    new = brought >= 0
    tl.store(held_at, brought, new)
    for i in tl.range(0, CHUNK_SIZE):
        position = brought * CHUNK_SIZE + i
        index = place * CHUNK_SIZE + i
        shadow_page = tl.load(shadow_table + s * shadow_width + position // PAGE_SIZE, new, other=0)
        page = tl.load(page_table + s * page_width + index // PAGE_SIZE, new, other=0)
        out = ((s.to(tl.int64) * PLACES + place) * CHUNK_SIZE + i) * KV_HEADS + head
        tl.store(rows + out, tl.where(new, shadow_page * PAGE_SIZE + position % PAGE_SIZE, -1), inside)
        tl.store(positions + out, tl.where(new, position, -1), inside)
        tl.store(targets + out, tl.where(new, page * PAGE_SIZE + index % PAGE_SIZE, -1), inside)


def kernel_spec(kv_heads: int, places: int, chunk_size: int, page_size: int) -> KernelSpec:
    """The kernel for so many places; all tensors are contiguous."""
    names = ("selected", "cached", "slot", "shadow_table", "page_table")
    return KernelSpec(
        name="chunk_cache_update",
        function=chunk_cache_update_kernel,
        inputs=tuple(Pointer(name, torch.int32) for name in names),
        sizes=(
            Size("num_sequences", "slot", 0),
            Size("shadow_width", "shadow_table", 1),
            Size("page_width", "page_table", 1),
        ),
        outputs=tuple(Pointer(name, torch.int32) for name in ("cached_out", "rows", "positions", "targets")),
        constants=(
            ("KV_HEADS", kv_heads),
            ("PLACES", places),
            ("CHUNK_SIZE", chunk_size),
            ("PAGE_SIZE", page_size),
            ("BLOCK", triton.next_power_of_2(max(1, places))),
        ),
        grid=lambda sizes: (sizes["num_sequences"], kv_heads, 1),
        num_warps=4,
    )


def launch(
    selected: Tensor,
    cached: Tensor,
    slot: Tensor,
    shadow_table: Tensor,
    page_table: Tensor,
    chunk_size: int,
    page_size: int,
    *,
    wrap: Callable[[Any], Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same arguments and results as `plugins.chunk_cache_update`, on the GPU; `cached` is contiguous.

    wrap: as in `plugins.triton_kernel.run_kernel`. Values are not checked.
    """
    sequences, kv_heads, places = selected.shape
    rows, positions, targets = (selected.new_empty((sequences * places * chunk_size, kv_heads)) for _ in range(3))
    tensors = {
        "selected": selected.contiguous(),
        "cached": cached,
        "slot": slot,
        "shadow_table": shadow_table.contiguous(),
        "page_table": page_table.contiguous(),
        "cached_out": cached,
        "rows": rows,
        "positions": positions,
        "targets": targets,
    }
    run_kernel(kernel_spec(kv_heads, places, chunk_size, page_size), tensors, wrap)
    return rows, positions, targets
