"""The definition of LowRankKeyReconstruct in plain torch."""

import itertools

import torch
from torch import Tensor


def reference(
    u: Tensor,
    sv: Tensor,
    slot: Tensor,
    chunks: Tensor,
    shadow_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    chunk_size: int,
) -> Tensor:
    """Keys K = RoPE(U[row] SV) of the listed chunks of S sequences (ShadowKV, arXiv 2410.21465, section 4.1).

    u: [shadow_pages, page_size, rank] float32 or bfloat16, the left factors of all sequences. sv:
    [slots, kv_heads, rank, head_dim] in u's dtype. slot: [S] int32, each sequence's row of sv, negative = a sequence
    for which nothing is done. chunks: [S, kv_heads, n] int32, as `chunk_cache_update` gives them: the first negative
    chunk ends a list. shadow_table: [S, Ms] int32, the pages of the chunks. cos, sin: [num_positions, head_dim/2]
    float32, element i of a head pairs with i + head_dim/2. page_size is a multiple of chunk_size.

    Token i of chunk m is at position p = m * chunk_size + i, and its row is
    shadow_table[s, p // page_size] * page_size + p % page_size.
    Result: [S, kv_heads, n * chunk_size, head_dim] in u.dtype, the keys of a list's chunks one after the other; those
    behind its end are anything. Product and rotation are float32.
    Raises RuntimeError on a wrong shape or dtype, and on a slot, a chunk or a page outside its range.
    """
    sequences, kv_heads, count = chunks.shape
    page_size, offsets = u.shape[1], torch.arange(chunk_size)
    out = torch.zeros(sequences, kv_heads, count * chunk_size, sv.shape[3], dtype=u.dtype)
    for s, head in itertools.product(range(sequences), range(kv_heads)):
        if slot[s] < 0:
            continue
        listed = list(itertools.takewhile(lambda chunk: chunk >= 0, chunks[s, head].tolist()))
        position = (torch.tensor(listed, dtype=torch.int64)[:, None] * chunk_size + offsets).flatten()
        factor = u[shadow_table[s, position // page_size].long(), position % page_size]
        key = factor.float() @ sv[int(slot[s]), head].float()
        first, second = key.chunk(2, dim=-1)
        c, d = cos[position], sin[position]
        rotated = torch.cat((first * c - second * d, second * c + first * d), dim=-1)
        out[s, head, : len(position)] = rotated.to(u.dtype)
    return out
