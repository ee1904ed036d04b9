"""ChunkCacheUpdate: which selected chunks are not in their places yet, and which places they take (ShadowKV)."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.chunk_cache_update.reference import reference
from plugins.operator import Operator
from plugins.registration import define

SCHEMA = "(Tensor selected, Tensor(a!) cached, Tensor(b!) counts, Tensor slot) -> (Tensor, Tensor)"

OPERATOR = Operator(
    name="chunk_cache_update",
    schema=SCHEMA,
    reference=reference,
    version=2,
    faces=("reference", "cpu", "triton"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(selected, cached, counts, slot) -> tuple[Tensor, Tensor]:
    return torch.empty_like(selected), torch.empty_like(selected)


define(OPERATOR.name, SCHEMA, _fake)


def chunk_cache_update(selected: Tensor, cached: Tensor, counts: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Updates in place which chunk each place of the cache holds, and returns (chunks, places), what is to be brought
    in and where, each [S, kv_heads, n] int32 (ShadowKV, arXiv 2410.21465, section 4.2).

    selected: [S, kv_heads, n] int32, ascending, then negative = none. cached: [slots, kv_heads, n] int32, the chunk
    in each place, negative = none. counts: [slots, kv_heads, 2] int64, to which the number of selected chunks and the
    number of those that are in place are added. slot: [S] int32, each sequence's own row of `cached` and `counts`,
    negative = a sequence for which nothing is done.

    A selected chunk that is cached stays in its place; missed chunks take the places of chunks that are no longer
    selected. Both results are ascending, the k-th chunk goes to the k-th place; -1 behind the last one.
    Raises RuntimeError on a wrong shape or dtype, a slot outside its range or twice, and chunks that do not ascend,
    before any write.
    """
    return torch.ops.kvforge.chunk_cache_update(selected, cached, counts, slot)
