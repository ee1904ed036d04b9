"""Attention in which every KV head reads its own parts of pages.

A *column* is what one KV head has of ``size`` consecutive slots of a page, ``size`` a divisor of the page size. Every
head of every sequence is then a sequence of its own with one KV head, and a column a page: of the same pool, seen with
other strides.
"""

import math

import torch
from torch import Tensor

from plugins.paged_attention import paged_attention


def columns_of(pool: Tensor, size: int) -> Tensor:
    """Return a view ``[columns, size, 1, ...]`` of ``pool`` ``[pages, page_size, kv_heads, ...]``, contiguous: see
    ``column_number``. Other numbers stand for nothing."""
    num_pages, page_size, kv_heads = pool.shape[:3]
    rest = tuple(pool.shape[3:])
    step = math.prod(rest)
    count = (num_pages * page_size - size) * kv_heads + kv_heads
    return pool.as_strided((count, size, 1, *rest), (step, kv_heads * step, step, *(1,) * len(rest)))


def column_number(page: Tensor, slot: Tensor | int, page_size: int, kv_heads: int) -> Tensor:
    """Return the columns that begin at ``slot`` of ``page``, for the KV heads in their order; all int32
    ``[S, kv_heads, N]``."""
    head = torch.arange(kv_heads, dtype=torch.int32, device=page.device)[:, None]
    return (page * page_size + slot) * kv_heads + head


def attend_columns(
    q: Tensor,
    cache: tuple[Tensor, ...],
    query_start: Tensor,
    columns: Tensor,
    lengths: Tensor,
    size: int,
    scale: float,
    kv_scales: tuple[float, float],
) -> Tensor:
    """Return ``[T, heads, d]``: attention of ``q`` ``[T, heads, d]`` to ``lengths`` ``[S, kv_heads]`` tokens. They fill
    ``columns`` ``[S, kv_heads, N]`` in this order, a sequence's queries being its last ones; both int32. ``cache`` is
    K and V pool, and their scales where there are any."""
    num_tokens, num_heads = q.shape[:2]
    kv_heads = cache[0].shape[2]
    k_pool, v_pool, *scales = [columns_of(pool, size) for pool in cache]
    k_scales, v_scales = scales or (None, None)
    offsets = torch.arange(kv_heads, dtype=torch.int32, device=q.device)[:, None] * num_tokens
    starts = (query_start[:-1] + offsets).flatten()
    by_head = q.unflatten(1, (kv_heads, num_heads // kv_heads)).transpose(0, 1).flatten(0, 1)
    attended = paged_attention(
        by_head.contiguous(),
        k_pool,
        v_pool,
        torch.cat((starts, query_start[-1:] * kv_heads)),
        lengths.T.flatten(),
        columns.transpose(0, 1).flatten(0, 1),
        scale,
        0,
        k_scales,
        v_scales,
        k_scale=kv_scales[0],
        v_scale=kv_scales[1],
    )
    return attended.unflatten(0, (kv_heads, num_tokens)).transpose(0, 1).flatten(1, 2)
