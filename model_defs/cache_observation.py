"""Watching how much attention cached tokens get, for KV policies that evict (H2O, arXiv 2306.14048, and its kin)."""

from dataclasses import dataclass, field

from torch import Tensor

from plugins.attention_mass import attention_mass


@dataclass(frozen=True)
class CacheObservation:
    """``attention_mass`` of ``kind`` before every attention; nothing where that is None.

    The last ``num_pools`` of an owner's pools are the policy's: the second is what is observed, of kind 1 also the
    third.
    """

    kind: int | None
    num_pools: int
    needs_positions: bool = False
    owners_share: bool = False

    def begin(
        self, inputs: tuple[Tensor, ...], rope_cos: Tensor | None, rope_sin: Tensor | None
    ) -> "StepObservation | None":
        """See ``CacheInsertion``."""
        return None if self.kind is None else StepObservation(self, *inputs)

    def attention(self, inputs: tuple[Tensor, ...]) -> None:
        """See ``CacheInsertion``."""

    def after_attention(self, inputs: tuple[Tensor, ...]) -> None:
        """See ``CacheInsertion``."""


@dataclass(frozen=True)
class StepObservation:
    """What is observed in a step of S sequences: their pages of statistics ``state_table`` ``[S, Ms]``, how many of
    their last queries are ``observed``, and how many slots are ``scored`` already, each ``[S]``, all int32."""

    observation: CacheObservation
    state_table: Tensor
    observed: Tensor
    scored: Tensor
    seen: list[Tensor] = field(default_factory=list)
    """K pools that layers have observed: those who share one go on from what the first has written."""

    def __call__(
        self,
        q: Tensor,
        pool: tuple[Tensor, ...],
        query_start: Tensor,
        kv_length: Tensor,
        page_table: Tensor,
        scale: float,
        k_scale: float,
    ) -> None:
        """See ``BeforeAttention``."""
        state = pool[len(pool) - self.observation.num_pools :]
        cache = pool[: len(pool) - len(state)]
        assert self.observation.kind is not None
        is_first = not any(cache[0] is one for one in self.seen)
        self.seen.append(cache[0])
        attention_mass(
            q,
            cache[0],
            query_start,
            kv_length,
            page_table,
            self.state_table,
            (query_start[1:] - query_start[:-1] - self.observed).clamp(min=0),
            self.scored if is_first else kv_length,
            scale,
            self.observation.kind,
            state[1],
            state[2] if self.observation.kind == 1 else None,
            cache[2] if len(cache) > 2 else None,
            k_scale,
        )
