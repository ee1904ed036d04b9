"""The definition of ChunkCacheUpdate in plain torch."""

import torch
from torch import Tensor


def reference(selected: Tensor, cached: Tensor, counts: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `plugins.chunk_cache_update`; writes `cached` and `counts` in place."""
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
