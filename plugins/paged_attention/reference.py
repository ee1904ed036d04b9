"""The definition of PagedAttention in plain torch."""

import torch
from torch import Tensor

from plugins.kv_quantization import INT4, dequantize
from plugins.kv_rotation import rotate_blocks


def reference(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    query_start: Tensor,
    kv_length: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    rotates_keys: bool = False,
) -> Tensor:
    """Attention of T packed queries, causal from the right, over the pages of their sequences.

    q: [T, heads, head_dim] already rotated, heads a multiple of kv_heads; k_pool, v_pool: [pages, page_size,
    kv_heads, head_dim] bfloat16, float32, float8_e4m3fn or int8, or uint8 with head_dim/2 for int4.
    query_start: [S+1] int32 from 0 to T; kv_length: [S] int32; page_table: [S, M] int32 physical pages, entries that
    no query needs are arbitrary.
    Sequence s has n = query_start[s+1] - query_start[s] queries (0 allowed), the last n of its kv_length[s]
    positions; the query at position p attends keys 0..p, with window > 0 keys max(0, p-window+1)..p. `scale`
    multiplies the scores. Result: [T, heads, head_dim] in q.dtype, contiguous, softmax and sums in float32.
    The value of an 8-bit element is the stored number times k_scales[page, offset, head] (float32, [pages,
    page_size, kv_heads]), or times the float k_scale where there are none; likewise V. Pools of int4 have scales and
    hold heads rotated by plugins.kv_rotation: with such a k_pool q is rotated and rounded to its dtype, with such a
    v_pool the result is rotated back. K and V have one dtype, or one is of int8 and the other of int4. With
    `rotates_keys` a k_pool of int8 with scales holds rotated heads as well.
    sinks: float32 [heads]; a query's weights sum to less than 1 by that of one more score, its head's sink, which no
    value goes with: sums of exp(score) have exp(sink) added.
    A sequence's result does not depend, in any bit, on the other sequences or on which pages it has.
    Raises RuntimeError on a wrong shape or dtype, and on a needed page outside the pools.
    """
    page_size, num_kv_heads = k_pool.shape[1:3]
    group = q.shape[1] // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype)
    q = rotate_blocks(q).to(q.dtype) if rotates_keys or k_pool.dtype == INT4 else q
    starts = query_start.tolist()
    for s, length in enumerate(kv_length.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        position = torch.arange(length - (end - begin), length)
        first_key = max(0, int(position[0]) - window + 1) if window > 0 else 0
        key = torch.arange(first_key, length)
        page = page_table[s, key // page_size].long()
        k = _values(k_pool, k_scales, k_scale, page, key % page_size).repeat_interleave(group, dim=1)
        v = _values(v_pool, v_scales, v_scale, page, key % page_size).repeat_interleave(group, dim=1)
        hidden = key[None, :] > position[:, None]
        if window > 0:
            hidden |= key[None, :] <= position[:, None] - window
        score = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scale
        score = score.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            score = torch.cat((score, sinks[:, None, None].expand(-1, end - begin, 1)), dim=-1)
        weight = score.softmax(dim=-1)[..., : len(key)]
        attended = torch.einsum("hqk,khd->qhd", weight, v)
        out[begin:end] = (rotate_blocks(attended) if v_pool.dtype == INT4 else attended).to(q.dtype)
    return out


def _values(pool: Tensor, scales: Tensor | None, scale: float, page: Tensor, offset: Tensor) -> Tensor:
    """The cached vectors at these places, [keys, kv_heads, head_dim] float32."""
    return dequantize(pool[page, offset], None if scales is None else scales[page, offset], scale)
