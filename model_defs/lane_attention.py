"""Attention over caches whose KV heads keep different numbers of tokens, for KV policies with budgets of heads (AdaKV,
arXiv 2407.11550).

A *column* is one KV head's part of a page. A sequence whose cache was cut down has the columns of its first pages
divided among its heads, each any number of them; later tokens are in pages as ever. For attention every head of every
sequence is a sequence of its own with one KV head, and a column a page: of the same pool, seen with other strides.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model_defs.cache_observation import CacheObservation, StepObservation
from plugins.paged_attention import paged_attention


@dataclass(frozen=True)
class LaneObservation(CacheObservation):
    """Observes as ``CacheObservation`` does and attends by head. On average ``budget`` tokens of a head are left of a
    prompt, in whole pages. The last two of an owner's pools are ``lane_pages`` and ``lane_table``, the last input is
    ``lane_slot``."""

    budget: int = 0

    def begin(
        self, inputs: tuple[Tensor, ...], rope_cos: Tensor | None, rope_sin: Tensor | None
    ) -> StepObservation | None:
        """See ``CacheInsertion``."""
        return super().begin(inputs[:-1], rope_cos, rope_sin)

    def attention(self, inputs: tuple[Tensor, ...]) -> "LaneAttention":  # type: ignore[override]
        """See ``CacheInsertion``."""
        return LaneAttention(self, inputs[-1])


@dataclass(frozen=True)
class LaneAttention:
    """``slot`` ``[S]`` int32: the rows of sequences in ``lane_pages`` ``[slots, kv_heads]``, the columns that each head
    has, and ``lane_table`` ``[slots, kv_heads, W]``, which they are; -1 while heads have all tokens."""

    observation: LaneObservation
    slot: Tensor

    def __call__(
        self,
        q: Tensor,
        pool: tuple[Tensor, ...],
        query_start: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        scale: float,
        kv_scales: tuple[float, float],
    ) -> Tensor:
        """See ``Attention``."""
        k_pool, v_pool, *scales = pool[: len(pool) - self.observation.num_pools]
        page_size, kv_heads = k_pool.shape[1:3]
        num_tokens, num_heads = q.shape[:2]
        table, length = self._lanes(page_table, kv_length, pool[-2], pool[-1], page_size)
        k_scales, v_scales = [columns_of(one) for one in scales] or (None, None)
        offsets = torch.arange(kv_heads, dtype=torch.int32, device=q.device)[:, None] * num_tokens
        starts = (query_start[:-1] + offsets).flatten()
        by_head = q.unflatten(1, (kv_heads, num_heads // kv_heads)).transpose(0, 1).flatten(0, 1)
        attended = paged_attention(
            by_head.contiguous(),
            columns_of(k_pool),
            columns_of(v_pool),
            torch.cat((starts, query_start[-1:] * kv_heads)),
            length.T.flatten(),
            table.transpose(0, 1).flatten(0, 1),
            scale,
            0,
            k_scales,
            v_scales,
            k_scale=kv_scales[0],
            v_scale=kv_scales[1],
        )
        return attended.unflatten(0, (kv_heads, num_tokens)).transpose(0, 1).flatten(1, 2)

    def _lanes(
        self, page_table: Tensor, kv_length: Tensor, lane_pages: Tensor, lane_table: Tensor, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return the columns ``[S, kv_heads, W + M]`` and the tokens ``[S, kv_heads]`` of every head, int32."""
        kv_heads, width = lane_table.shape[1:]
        num_pages = page_table.shape[1]
        row, is_cut = self.slot.clamp(min=0), (self.slot >= 0)[:, None]
        own = torch.where(is_cut, lane_pages.index_select(0, row), 0)
        shared = is_cut.int() * (self.observation.budget // page_size)
        index = torch.arange(width + num_pages, dtype=torch.int32, device=page_table.device)
        page = (index - own[..., None] + shared[..., None]).clamp(0, num_pages - 1)
        column = torch.arange(kv_heads, dtype=torch.int32, device=page_table.device)[:, None]
        of_page = page_table[:, None].expand(-1, kv_heads, -1).gather(2, page.long()) * (page_size * kv_heads) + column
        place = index.clamp(max=width - 1).long().expand(own.shape[0], kv_heads, -1)
        of_lane = lane_table.index_select(0, row).gather(2, place)
        table = torch.where(index < own[..., None], of_lane, of_page)
        return table, kv_length[:, None] + (own - shared) * page_size


def columns_of(pool: Tensor) -> Tensor:
    """Return a view ``[columns, page_size, 1, ...]`` of ``pool`` ``[pages, page_size, kv_heads, ...]``, contiguous: the
    column of head h in page p is number p * page_size * kv_heads + h. Other numbers stand for nothing."""
    num_pages, page_size, kv_heads = pool.shape[:3]
    rest = tuple(pool.shape[3:])
    size = math.prod(rest)
    count = (num_pages - 1) * page_size * kv_heads + kv_heads
    inner = (1,) * len(rest)
    return pool.as_strided((count, page_size, 1, *rest), (size, kv_heads * size, size, *inner))
