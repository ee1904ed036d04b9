"""The definition of SelectedKvWrite in plain torch."""

import torch
from torch import Tensor

from plugins.low_rank_key_reconstruct.reference import reference as reconstruct


def reference(
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
    """Same arguments as `plugins.selected_kv_write`; writes the pools in place."""
    page_size, offsets = k_pool.shape[1], torch.arange(chunk_size)
    start = torch.tensor([0, chunk_size])
    for s, head in (chunks[:, :, :1] >= 0).any(-1).nonzero().tolist():
        own = int(slot[s])
        for chunk, place in zip(chunks[s, head].tolist(), places[s, head].tolist(), strict=True):
            if chunk < 0 or own < 0:
                break
            position, target = chunk * chunk_size + offsets, place * chunk_size + offsets
            page, offset = shadow_table[s, position // page_size].long(), position % page_size
            factor, rows = u[page, offset], offsets[:, None]
            keys = reconstruct(factor, sv[own, head][None, None], start, rows, position[:, None], cos, sin)
            to, at = page_table[s, target // page_size].long(), target % page_size
            k_pool[to, at, head] = keys[:, 0]
            v_pool[to, at, head] = host_v[page, offset, head]
