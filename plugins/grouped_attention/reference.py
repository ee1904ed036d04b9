"""The definition of GroupedAttention in plain torch."""

import torch
from torch import Tensor

from plugins.seal_pages.reference import sealed_values


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
    q.dtype, softmax and sums in float32. A query's result does not depend, in any bit, on the other queries and
    sequences or on which pages these have.
    Raises RuntimeError on a wrong shape or dtype, and on a needed page outside the pools.
    """
    page_size, num_kv_heads = exact_k.shape[1:3]
    group = q.shape[1] // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype)
    starts = query_start.tolist()
    for s, length in enumerate(kv_length.tolist()):
        for row in range(starts[s], starts[s + 1]):
            position = length - starts[s + 1] + row
            own, first = position // page_size, max(0, position - window + 1) if window > 0 else 0
            pages, exact = page_table[s, :own].long(), int(exact_table[s, own])
            newest = slice(0, position % page_size + 1)
            k = torch.cat((sealed_values(k_codes[pages], k_groups[pages], False).flatten(0, 1), exact_k[exact, newest]))
            v = torch.cat((sealed_values(v_codes[pages], v_groups[pages], True).flatten(0, 1), exact_v[exact, newest]))
            k, v = (x[first:].float().repeat_interleave(group, dim=1) for x in (k, v))
            score = torch.einsum("hd,khd->hk", q[row].float(), k) * scale
            out[row] = torch.einsum("hk,khd->hd", score.softmax(-1), v).to(q.dtype)
    return out
