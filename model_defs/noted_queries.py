"""Rotated queries of a prompt's last tokens, kept for KV policies that expect more of their kind (expected attention,
arXiv 2510.00636)."""

from dataclasses import dataclass

from torch import Tensor

from model_defs.notes import StepNotes


@dataclass(frozen=True)
class NotedQueries:
    """Notes queries in the layer that owns a cache: the last of its pools is ``queries`` ``[slots, tokens + 1, heads,
    d]`` float32, the inputs are ``StepNotes``'s."""

    num_pools: int
    needs_positions: bool = True
    owners_share: bool = False

    def begin(self, inputs: tuple[Tensor, ...], rope_cos: Tensor | None, rope_sin: Tensor | None) -> "StepQueries":
        """See ``CacheInsertion``."""
        return StepQueries(StepNotes(*inputs))

    def after_write(self, inputs: tuple[Tensor, ...]) -> None:
        """See ``CacheInsertion``."""

    def attention(self, inputs: tuple[Tensor, ...]) -> None:
        """See ``CacheInsertion``."""

    def after_attention(self, inputs: tuple[Tensor, ...]) -> None:
        """See ``CacheInsertion``."""


@dataclass(frozen=True)
class StepQueries:
    """Notes queries of a step."""

    notes: StepNotes

    def __call__(
        self,
        q: Tensor,
        pool: tuple[Tensor, ...],
        query_start: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        scale: float,
        k_scale: float,
    ) -> tuple[Tensor, ...]:
        """See ``BeforeAttention``."""
        self.notes.write(pool[-1], q.float(), pool[0], query_start)
        return pool
