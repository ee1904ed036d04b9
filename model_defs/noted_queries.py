"""Rotated queries of a prompt's last tokens, kept for KV policies that expect more of their kind (expected attention,
arXiv 2510.00636)."""

from dataclasses import dataclass

from torch import Tensor

from model_defs.cache_insertion import CacheInsertion, Pages, Pool
from model_defs.notes import StepNotes


@dataclass(frozen=True)
class NotedQueries(CacheInsertion):
    """Notes queries in the layer that owns a cache: the last of its pools is ``queries`` ``[slots, tokens + 1, heads,
    d]`` float32, the inputs are ``StepNotes``'s."""

    needs_positions: bool = True

    def begin(self, inputs: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> "StepQueries":
        return StepQueries(StepNotes(*inputs))


@dataclass(frozen=True)
class StepQueries:
    """Notes queries of a step."""

    notes: StepNotes

    def __call__(self, q: Tensor, pool: Pool, pages: Pages, scale: float, k_scale: float) -> Pool:
        """See ``BeforeAttention``."""
        self.notes.write(pool[-1], q.float(), pool[0], pages.query_start)
        return pool
