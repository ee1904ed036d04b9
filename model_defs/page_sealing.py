"""A cache of which whole pages are stored in 4, 3 or 2 bits (``kivi4`` …), with exact pages for the newest tokens.

A step writes K and V to exact pages. Those that it fills are sealed at once, before any layer attends. A query reads
its own page exactly and the pages before it sealed, so that what it sees depends on its position alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_defs.cache_insertion import CacheInsertion, Pages, Pool
from plugins.grouped_attention import grouped_attention
from plugins.seal_pages import seal_pages


@dataclass(frozen=True)
class PageSealing(CacheInsertion):
    """An owner's pool is the exact K and V ``[exact pages, page_size, kv_heads, d]``, then the sealed pages'
    ``num_pools`` tensors; the input is ``exact_table`` ``[S, M]`` int32, the exact page of each logical page that the
    step writes."""

    def after_write(self, inputs: tuple[Tensor, ...]) -> "StepSealing":
        return StepSealing(*inputs)

    def attention(self, inputs: tuple[Tensor, ...]) -> "SealedAttention":
        return SealedAttention(*inputs)


@dataclass(frozen=True)
class StepSealing:
    """Seals the pages that a step fills: those that end behind the tokens which a sequence had before, and not behind
    its last one."""

    exact_table: Tensor

    def __call__(self, pool: Pool, pages: Pages) -> None:
        """See ``AfterWrite``."""
        query_start, kv_length, page_table = pages
        page_size = pool[0].shape[1]
        before = kv_length - (query_start[1:] - query_start[:-1])
        end = page_size * torch.arange(1, page_table.shape[1] + 1, dtype=torch.int32, device=page_table.device)
        is_filled = (end > before[:, None]) & (end <= kv_length[:, None])
        exact = torch.where(is_filled, self.exact_table, -1)
        k_codes, v_codes, k_groups, v_groups = pool[2:]
        pairs = torch.stack((exact, page_table), -1).flatten(0, 1)
        seal_pages(pool[0], pool[1], pairs, k_codes, v_codes, k_groups, v_groups)


@dataclass(frozen=True)
class SealedAttention:
    """Attends to a query's own page by ``exact_table``, and to those before it by the page table."""

    exact_table: Tensor

    def __call__(
        self, q: Tensor, pool: Pool, pages: Pages, scale: float, kv_scales: tuple[float, float], window: int
    ) -> Tensor:
        """See ``Attention``."""
        query_start, kv_length, page_table = pages
        exact_k, exact_v, k_codes, v_codes, k_groups, v_groups = pool
        return grouped_attention(
            q,
            k_codes,
            v_codes,
            k_groups,
            v_groups,
            exact_k,
            exact_v,
            query_start,
            kv_length,
            page_table,
            self.exact_table,
            scale,
            window,
        )
