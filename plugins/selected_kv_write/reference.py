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
    """Brings chunks of S sequences into the pools, in place (ShadowKV, arXiv 2410.21465, section 4.2): of each token
    its key RoPE(U[row] SV), as `low_rank_key_reconstruct` computes it, and its value host_v[row].

    u: [shadow_pages, page_size, rank] and sv: [slots, kv_heads, rank, head_dim], the factors. host_v:
    [shadow_pages, page_size, kv_heads, head_dim], for CUDA also in pinned host memory. slot: [S] int32, each
    sequence's row of sv, negative = a sequence for which nothing is done. chunks, places: [S, kv_heads, n] int32, as
    `chunk_cache_update` gives them: the first negative chunk ends a list. shadow_table: [S, Ms] int32, the pages of
    the chunks; page_table: [S, M] int32, those of the places. cos, sin: [num_positions, head_dim/2] float32.
    k_pool, v_pool: [pages, page_size, kv_heads, head_dim]. u, sv, host_v and pools are of one dtype, float32 or
    bfloat16, and page_size is a multiple of chunk_size. Places of a head, and pages of a table, are distinct.

    Token i of chunk m is at position p = m * chunk_size + i, its row is shadow_table[s, p // page_size] * page_size +
    p % page_size, and it goes to the slot of the pools that page_table says likewise for place * chunk_size + i.
    Raises RuntimeError on a wrong shape or dtype, and on a slot, a chunk, a place or a page outside its range, before
    any write.
    """
    page_size, offsets = k_pool.shape[1], torch.arange(chunk_size)
    keys = reconstruct(u, sv, slot, chunks, shadow_table, cos, sin, chunk_size)
    for s, head in (chunks[:, :, :1] >= 0).any(-1).nonzero().tolist():
        for index, (chunk, place) in enumerate(zip(chunks[s, head].tolist(), places[s, head].tolist(), strict=True)):
            if chunk < 0 or slot[s] < 0:
                break
            position, target = chunk * chunk_size + offsets, place * chunk_size + offsets
            page, offset = shadow_table[s, position // page_size].long(), position % page_size
            to, at = page_table[s, target // page_size].long(), target % page_size
            k_pool[to, at, head] = keys[s, head, index * chunk_size + offsets]
            v_pool[to, at, head] = host_v[page, offset, head]
