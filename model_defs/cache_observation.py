"""Watching how much attention cached tokens get, for KV policies that evict (H2O, arXiv 2306.14048, and its kin)."""

from dataclasses import dataclass, field

from torch import Tensor

from model_defs.cache_insertion import CacheInsertion, Pages, Pool
from plugins.attention_mass import attention_mass
from plugins.attention_mass.reference import LARGEST_WEIGHT, SUM_AND_SQUARES


@dataclass(frozen=True)
class CacheObservation(CacheInsertion):
    """``attention_mass`` of ``kind`` before every attention; nothing where that is None.

    The last ``num_pools`` of an owner's pools are the policy's: the second is what is observed, of kind 1 also the
    third. The largest weights are those of any head of a group, which are observed one after the other; of all other
    kinds the group's mean counts.
    """

    kind: int | None

    def begin(self, inputs: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> "StepObservation | None":
        return None if self.kind is None else StepObservation(self, *inputs)


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

    def __call__(self, q: Tensor, pool: Pool, pages: Pages, scale: float, k_scale: float) -> Pool:
        """See ``BeforeAttention``."""
        query_start, kv_length, page_table = pages
        state = pool[len(pool) - self.observation.num_pools :]
        cache = pool[: len(pool) - len(state)]
        kind = self.observation.kind
        assert kind is not None
        is_first = not any(cache[0] is one for one in self.seen)
        self.seen.append(cache[0])
        by_member = q.unflatten(1, (cache[0].shape[2], -1)).unbind(2) if kind == LARGEST_WEIGHT else (q,)
        for queries in by_member:
            written = attention_mass(
                queries.contiguous(),
                cache[0],
                query_start,
                kv_length,
                page_table,
                self.state_table,
                (query_start[1:] - query_start[:-1] - self.observed).clamp(min=0),
                self.scored if is_first else kv_length,
                scale,
                kind,
                state[1],
                state[2] if kind == SUM_AND_SQUARES else None,
                cache[2] if len(cache) > 2 else None,
                k_scale,
            )
            state = (state[0], *written, *state[1 + len(written) :])
            is_first = False
        return (*cache, *state)
