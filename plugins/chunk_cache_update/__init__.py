"""ChunkCacheUpdate: which selected chunks are not in their places yet, and where their tokens go (ShadowKV)."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.chunk_cache_update.reference import reference
from plugins.operator import Operator
from plugins.registration import define

SCHEMA = (
    "(Tensor selected, Tensor(a!) cached, Tensor slot, Tensor shadow_table, Tensor page_table, int chunk_size, "
    "int page_size) -> (Tensor, Tensor, Tensor)"
)

OPERATOR = Operator(
    name="chunk_cache_update",
    schema=SCHEMA,
    reference=reference,
    version=1,
    faces=("reference", "cpu", "triton"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(selected, cached, slot, shadow_table, page_table, chunk_size, page_size) -> tuple[Tensor, Tensor, Tensor]:
    sequences, kv_heads, places = selected.shape
    rows, positions, targets = (selected.new_empty((sequences * places * chunk_size, kv_heads)) for _ in range(3))
    return rows, positions, targets


define(OPERATOR.name, SCHEMA, _fake)


def chunk_cache_update(
    selected: Tensor,
    cached: Tensor,
    slot: Tensor,
    shadow_table: Tensor,
    page_table: Tensor,
    chunk_size: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Updates in place which chunk each place of the cache holds, and returns (rows, positions, targets) of the
    tokens to be brought in, each [S * n * chunk_size, kv_heads] int32 (ShadowKV, arXiv 2410.21465, section 4.2).

    selected: [S, kv_heads, n] int32, distinct chunks, negative = none. cached: [slots, kv_heads, n] int32, the chunk
    in each place, negative = none. slot: [S] int32, each sequence's own row of `cached`, negative = a sequence for
    which nothing is done. shadow_table: [S, Ms] int32, pages of the prompt's tokens; page_table: [S, M] int32, pages
    of the cache that attention reads.

    A selected chunk that is cached stays in its place; missed chunks, in the order of `selected`, take the places, in
    ascending order, of chunks that are no longer selected. Row (s * n + place) * chunk_size + i of the results is
    token i of the chunk m that is new in the place: its row of the shadow pages, shadow_table[s, p // page_size] *
    page_size + p % page_size for its position p = m * chunk_size + i, that position, and its slot in the pools,
    likewise by page_table for p = place * chunk_size + i; -1 in all three where nothing is brought in.
    Raises RuntimeError on a wrong shape or dtype, a slot or a chunk outside its range, and on places outside
    page_table, before any write.
    """
    return torch.ops.kvforge.chunk_cache_update(selected, cached, slot, shadow_table, page_table, chunk_size, page_size)
