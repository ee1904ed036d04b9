"""The definition of ChunkCacheUpdate in plain torch."""

import torch
from torch import Tensor


def reference(
    selected: Tensor,
    cached: Tensor,
    slot: Tensor,
    shadow_table: Tensor,
    page_table: Tensor,
    chunk_size: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same arguments and results as `plugins.chunk_cache_update`; writes `cached` in place."""
    sequences, kv_heads, places = selected.shape
    rows, positions, targets = torch.full((3, sequences, places, chunk_size, kv_heads), -1, dtype=torch.int32)
    offsets = torch.arange(chunk_size)
    for s, place_table in enumerate(slot.tolist()):
        if place_table < 0:
            continue
        for head in range(kv_heads):
            wanted = [chunk for chunk in selected[s, head].tolist() if chunk >= 0]
            held = cached[place_table, head].tolist()
            free = (place for place in range(places) if held[place] not in wanted)
            for chunk, place in zip([chunk for chunk in wanted if chunk not in held], free, strict=False):
                cached[place_table, head, place] = chunk
                position = chunk * chunk_size + offsets
                rows[s, place, :, head] = _slots(shadow_table[s], position, page_size)
                positions[s, place, :, head] = position.int()
                targets[s, place, :, head] = _slots(page_table[s], place * chunk_size + offsets, page_size)
    return rows.view(-1, kv_heads), positions.view(-1, kv_heads), targets.view(-1, kv_heads)


def _slots(pages: Tensor, position: Tensor, page_size: int) -> Tensor:
    return pages[position // page_size] * page_size + (position % page_size).int()
