"""ChunkCacheUpdate in Triton: one program per sequence and KV head."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel

_STEP = 16  # selected chunks that are compared with all places at once, where that is no more than so many pairs:
_PAIRS = 1 << 14


@triton.jit
def chunk_cache_update_kernel(
    selected,
    cached,
    counts,
    slot,
    num_sequences,
    chunks,
    places,
    cached_out,
    counts_out,
    KV_HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    if cached is None:  # a graph of torch gives what is updated in place as the output alone
        cached = cached_out
        counts = counts_out
    s = tl.program_id(0)
    head = tl.program_id(1)
    own = tl.load(slot + s)
    place = tl.arange(0, BLOCK)
    inside = place < PLACES
    row = tl.maximum(own, 0).to(tl.int64) * KV_HEADS + head
    held_at = cached + row * PLACES + place
    held = tl.load(held_at, inside & (own >= 0), other=-1)
    first_place = (s.to(tl.int64) * KV_HEADS + head) * PLACES
    wanted_at = selected + first_place
    step = tl.arange(0, STEP)
    hits = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, PLACES, STEP):
        chunk = tl.load(wanted_at + first + step, first + step < PLACES, other=-1)
        same = (held[:, None] == chunk[None, :]) & (chunk >= 0)[None, :]
        hits = tl.maximum(hits, tl.max(same.to(tl.int32), axis=1))
    free = inside & (hits == 0)
    free_rank = tl.cumsum(free.to(tl.int32), axis=0)
    brought = place * 0 - 1
    num_missed = own * 0
    num_wanted = own * 0
    for first in tl.range(0, PLACES, STEP):
        chunk = tl.load(wanted_at + first + step, (first + step < PLACES) & (own >= 0), other=-1)
        same = (held[:, None] == chunk[None, :]).to(tl.int32)
        missed = ((tl.max(same, axis=0) == 0) & (chunk >= 0)).to(tl.int32)
        rank = num_missed + tl.cumsum(missed, axis=0)
        match = free[:, None] & (missed == 1)[None, :] & (free_rank[:, None] == rank[None, :])
        brought = tl.maximum(brought, tl.max(tl.where(match, chunk[None, :], -1), axis=1))
        tl.store(chunks + first_place + rank - 1, chunk, missed == 1)
        num_missed += tl.sum(missed, axis=0)
        num_wanted += tl.sum((chunk >= 0).to(tl.int32), axis=0)
    new = brought >= 0
    tl.store(held_at, brought, new)
    tl.store(places + first_place + free_rank - 1, place, new)
    behind = inside & (place >= num_missed)
    tl.store(chunks + first_place + place, place * 0 - 1, behind)
    tl.store(places + first_place + place, place * 0 - 1, behind)
    if own >= 0:
        total = counts + row * 2
        tl.store(total, tl.load(total) + num_wanted)
        tl.store(total + 1, tl.load(total + 1) + num_wanted - num_missed)


def kernel_spec(kv_heads: int, places: int, pairs: int = _PAIRS) -> KernelSpec:
    """The kernel for so many places, which compares at most `pairs` at once; all tensors are contiguous."""
    block = triton.next_power_of_2(max(1, places))
    return KernelSpec(
        name="chunk_cache_update",
        function=chunk_cache_update_kernel,
        inputs=(
            Pointer("selected", torch.int32),
            Pointer("cached", torch.int32),
            Pointer("counts", torch.int64),
            Pointer("slot", torch.int32),
        ),
        sizes=(Size("num_sequences", "slot", 0),),
        outputs=(
            Pointer("chunks", torch.int32),
            Pointer("places", torch.int32),
            Pointer("cached_out", torch.int32),
            Pointer("counts_out", torch.int64),
        ),
        constants=(
            ("KV_HEADS", kv_heads),
            ("PLACES", places),
            ("BLOCK", block),
            ("STEP", min(_STEP, max(1, pairs // block))),
        ),
        grid=lambda sizes: (sizes["num_sequences"], kv_heads, 1),
        num_warps=4,
    )


def launch(
    selected: Tensor,
    cached: Tensor,
    counts: Tensor,
    slot: Tensor,
    *,
    wrap: Callable[[Any], Any] | None = None,
    pairs: int = _PAIRS,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `plugins.chunk_cache_update`, on the GPU; `cached` and `counts` are contiguous.

    wrap: as in `plugins.triton_kernel.run_kernel`. Values are not checked.
    """
    _, kv_heads, num_places = selected.shape
    chunks, places = torch.empty_like(selected), torch.empty_like(selected)
    tensors = {
        "selected": selected.contiguous(),
        "cached": cached,
        "counts": counts,
        "slot": slot,
        "cached_out": cached,
        "counts_out": counts,
        "chunks": chunks,
        "places": places,
    }
    run_kernel(kernel_spec(kv_heads, num_places, pairs), tensors, wrap)
    return chunks, places
