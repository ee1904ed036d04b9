"""Attention over caches whose KV heads keep different numbers of tokens, for KV policies with budgets of heads (AdaKV,
arXiv 2407.11550).

A sequence whose cache was cut down has the columns of its first pages divided among its heads, each any number of them;
later tokens are in pages as ever.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_defs.cache_insertion import Pages, Pool
from model_defs.cache_observation import CacheObservation, StepObservation
from model_defs.columns import attend_columns, column_number


@dataclass(frozen=True)
class LaneObservation(CacheObservation):
    """Observes as ``CacheObservation`` does and attends by head. On average ``budget`` tokens of a head are left of a
    prompt, in whole pages. The last two of an owner's pools are ``lane_pages`` and ``lane_table``, the last input is
    ``lane_slot``."""

    budget: int = 0

    def begin(self, inputs: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> StepObservation | None:
        return super().begin(inputs[:-1], tables)

    def attention(self, inputs: tuple[Tensor, ...]) -> "LaneAttention":
        return LaneAttention(self, inputs[-1])


@dataclass(frozen=True)
class MeasuredLanes(LaneObservation):
    """The same where as many pages are left of a prompt as its tokens say. The third last of an owner's pools is
    ``shared_pages`` ``[slots, 1]`` int32: of a row of ``lane_table``, the pages whose columns all lanes have."""


@dataclass(frozen=True)
class LaneAttention:
    """``slot`` ``[S]`` int32: the rows of sequences in ``lane_pages`` ``[slots, kv_heads]``, the columns that each head
    has, and ``lane_table`` ``[slots, kv_heads, W]``, which they are; -1 while heads have all tokens."""

    observation: LaneObservation
    slot: Tensor

    def __call__(
        self, q: Tensor, pool: Pool, pages: Pages, scale: float, kv_scales: tuple[float, float], window: int
    ) -> Tensor:
        """See ``Attention``."""
        query_start, kv_length, page_table = pages
        cache, page_size = pool[: len(pool) - self.observation.num_pools], pool[0].shape[1]
        columns, lengths = self._lanes(page_table, kv_length, pool, page_size)
        return attend_columns(q, cache, query_start, columns, lengths, page_size, scale, kv_scales)

    def _lanes(self, page_table: Tensor, kv_length: Tensor, pool: Pool, page_size: int) -> tuple[Tensor, Tensor]:
        """Return the columns ``[S, kv_heads, W + M]`` and the tokens ``[S, kv_heads]`` of every head, int32."""
        lane_pages, lane_table = pool[-2:]
        kv_heads, width = lane_table.shape[1:]
        num_pages = page_table.shape[1]
        row, is_cut = self.slot.clamp(min=0), (self.slot >= 0)[:, None]
        own = torch.where(is_cut, lane_pages.index_select(0, row), 0)
        shared = is_cut.int()
        if isinstance(self.observation, MeasuredLanes):
            shared = shared * pool[-3].index_select(0, row)
        else:
            shared = shared * (self.observation.budget // page_size)
        index = torch.arange(width + num_pages, dtype=torch.int32, device=page_table.device)
        later = (index - own[..., None] + shared[..., None]).clamp(0, num_pages - 1)
        page = page_table[:, None].expand(-1, kv_heads, -1).gather(2, later.long())
        place = index.clamp(max=width - 1).long().expand(own.shape[0], kv_heads, -1)
        of_lane = lane_table.index_select(0, row).gather(2, place)
        of_page = column_number(page, 0, page_size, kv_heads)
        return torch.where(index < own[..., None], of_lane, of_page), kv_length[:, None] + (own - shared) * page_size
