"""The definition of ChunkCacheUpdate in plain torch."""

import torch
from torch import Tensor


def reference(selected: Tensor, cached: Tensor, counts: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
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
    chunks, places = torch.full_like(selected, -1), torch.full_like(selected, -1)
    for s, row in enumerate(slot.tolist()):
        for head in range(selected.shape[1]) if row >= 0 else ():
            wanted = [chunk for chunk in selected[s, head].tolist() if chunk >= 0]
            held = cached[row, head].tolist()
            missed = [chunk for chunk in wanted if chunk not in held]
            free = [place for place, chunk in enumerate(held) if chunk not in wanted][: len(missed)]
            counts[row, head] += torch.tensor([len(wanted), len(wanted) - len(missed)])
            cached[row, head, free] = torch.tensor(missed, dtype=torch.int32)
            chunks[s, head, : len(missed)] = torch.tensor(missed, dtype=torch.int32)
            places[s, head, : len(missed)] = torch.tensor(free, dtype=torch.int32)
    return chunks, places
