"""Attending at each decode step to the chunks of a long prompt that can matter most (Quest, arXiv 2406.10774).

The cache stays whole. Of a chunk's keys the largest and smallest number in each dimension are known. They bound what
any of its keys can score. Each KV head reads the chunks with the largest bounds, and everything behind the prompt's
chunks.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_defs.cache_insertion import CacheInsertion, Pages, Pool
from model_defs.columns import attend_columns, column_number
from plugins.landmark_select import landmark_select


@dataclass(frozen=True)
class PageSelection(CacheInsertion):
    """Chunks of ``chunk_size`` tokens, of which a KV head reads ``max_selected``; the policy's pools of an owner are
    ``bounds`` and ``never``."""

    chunk_size: int
    max_selected: int
    num_pools: int = field(default=2, kw_only=True)

    def attention(self, inputs: tuple[Tensor, ...]) -> "SelectedAttention":
        return SelectedAttention(self, *inputs)


@dataclass(frozen=True)
class SelectedAttention:
    """``table`` ``[S, Ms]`` int32: a sequence's pages of ``bounds`` ``[pages, chunks of a page, kv_heads, 2 d]``, the
    largest numbers of each dimension, then the smallest, and of ``never`` ``[pages, chunks of a page, kv_heads]`` uint8
    zeros. ``num_chunks`` ``[S]`` int32: the chunks of its prompt, more than are read; 0 while it reads everything."""

    selection: PageSelection
    table: Tensor
    num_chunks: Tensor

    def __call__(
        self, q: Tensor, pool: Pool, pages: Pages, scale: float, kv_scales: tuple[float, float], window: int
    ) -> Tensor:
        """See ``Attention``."""
        query_start, kv_length, page_table = pages
        k_pool, v_pool, bounds, never = pool
        size, most = self.selection.chunk_size, self.selection.max_selected
        # Chunks are chosen by a sequence's last query; those of sequences without one are not read.
        last = q.index_select(0, (query_start[1:] - 1).clamp(min=0))
        chosen = landmark_select(
            torch.cat((last.clamp(min=0), last.clamp(max=0)), dim=-1),
            bounds,
            never,
            torch.arange(query_start.shape[0], dtype=torch.int32, device=q.device),
            self.table,
            self.num_chunks,
            self.num_chunks.clamp(max=most),
            scale,
            most,
        )
        page_size, kv_heads = k_pool.shape[1:3]
        chunks_per_page, num_pages = page_size // size, page_table.shape[1]
        own = self.num_chunks.clamp(max=most)[:, None, None]
        index = torch.arange(most + num_pages * chunks_per_page, dtype=torch.int32, device=q.device)
        place = index.clamp(max=most - 1).long().expand(chosen.shape[0], kv_heads, -1)
        later = index - own + self.num_chunks[:, None, None]
        chunk = torch.where(index < own, chosen.gather(2, place), later).clamp(0, num_pages * chunks_per_page - 1)
        page = page_table[:, None].expand(-1, kv_heads, -1).gather(2, (chunk // chunks_per_page).long())
        columns = column_number(page, chunk % chunks_per_page * size, page_size, kv_heads)
        lengths = (kv_length[:, None] - (self.num_chunks[:, None] - own[..., 0]) * size).expand(-1, kv_heads)
        return attend_columns(q, (k_pool, v_pool), query_start, columns, lengths, size, scale, kv_scales)
