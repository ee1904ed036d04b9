"""The definition of GroupedAttention in plain torch."""

import torch
from torch import Tensor

from plugins.seal_pages.layout import sealed_values


def reference(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_groups: Tensor,
    v_groups: Tensor,
    exact_k: Tensor,
    exact_v: Tensor,
    query_start: Tensor,
    kv_length: Tensor,
    page_table: Tensor,
    exact_table: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of T packed queries, causal from the right, to their own pages exactly and to sealed ones before.

    q: [T, heads, head_dim] already rotated, of the dtype of exact_k; the pools are those of `plugins.seal_pages`.
    query_start: [S+1] int32 from 0 to T; kv_length: [S] int32; page_table: [S, M] int32, the sealed page of each
    logical page; exact_table: [S, M] int32, its exact page; entries that no query needs are arbitrary.
    Sequence s has n = query_start[s+1] - query_start[s] queries (0 allowed), the last n of its kv_length[s] positions;
    the query at position p attends keys 0..p, with window > 0 keys max(0, p-window+1)..p: those of page p // page_size
    from exact pages, those before from sealed ones. `scale` multiplies the scores. Result: [T, heads, head_dim] in
    q.dtype, contiguous, softmax and sums in float32. A query's result does not depend, in any bit, on the other queries
    and sequences or on which pages these have.
    Raises RuntimeError on a wrong shape or dtype, and on a needed page outside the pools.
    """
    page_size, num_kv_heads = exact_k.shape[1:3]
    group = q.shape[1] // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype)
    starts = query_start.tolist()
    for s, length in enumerate(kv_length.tolist()):
        begin = length - (starts[s + 1] - starts[s])
        for own in range(begin // page_size, -(-length // page_size) if begin < length else 0):
            position = torch.arange(max(begin, own * page_size), min(length, (own + 1) * page_size))
            first_key = max(0, int(position[0]) - window + 1) if window > 0 else 0
            first_page = min(first_key // page_size, own)
            key = torch.arange(first_page * page_size, int(position[-1]) + 1)
            pages, exact = page_table[s, first_page:own].long(), int(exact_table[s, own])
            newest = len(key) - len(pages) * page_size
            k = sealed_values(k_codes[pages], k_groups[pages]).transpose(1, 2).flatten(0, 1)
            v = sealed_values(v_codes[pages], v_groups[pages]).permute(0, 3, 1, 2).flatten(0, 1)
            k, v = torch.cat((k, exact_k[exact, :newest].float())), torch.cat((v, exact_v[exact, :newest].float()))
            k, v = (x[key >= first_key].repeat_interleave(group, dim=1) for x in (k, v))
            key = key[key >= first_key]
            hidden = key[None, :] > position[:, None]
            if window > 0:
                hidden |= key[None, :] <= position[:, None] - window
            row = position - length + starts[s + 1]
            score = torch.einsum("qhd,khd->hqk", q[row].float(), k) * scale
            weight = score.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            out[row] = torch.einsum("hqk,khd->qhd", weight, v).to(q.dtype)
    return out
