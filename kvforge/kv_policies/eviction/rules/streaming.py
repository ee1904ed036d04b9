"""StreamingLLM (arXiv 2309.17453): the first tokens and the newest ones, for texts without end."""

from dataclasses import dataclass
from typing import Any, ClassVar

from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.policy import Eviction
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.state import EngineMemory, PolicyState, StatePool


@dataclass(frozen=True)
class Streaming(Eviction):
    """Keeps the first ``sinks`` tokens and the newest. With ``cache_positions`` (the default) distances are those of
    places in the cache (section 3.2): keys of the sinks are rotated on by the number of evicted tokens, all others are
    as far from each other as ever. With 0 they keep their distances in the text."""

    sinks: int = 4
    cache_positions: int = 1

    name: ClassVar[str] = "streaming"
    title: ClassVar[str] = "StreamingLLM"
    when: ClassVar[When] = When.ALWAYS
    optional: ClassVar[frozenset[str]] = frozenset({"sinks", "cache_positions"})

    @property
    def num_protected(self) -> int:
        return self.sinks

    def score(self, slots: Slots) -> Tensor:
        return slots.protect(slots.position, slots.position < self.sinks)

    @property
    def _rotates(self) -> bool:
        return self.sinks > 0 and self.cache_positions > 0

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """Beside positions, the sinks' own keys of each running sequence."""
        pools = super().state_pools(cache)
        if not self._rotates:
            return pools
        return (
            *pools,
            StatePool("sink_keys", "sequences", (self.sinks, cache.num_kv_heads, cache.head_dim), "float32"),
        )

    def _slot_bytes(self, cache: OwnerCache) -> int:
        return 4 * self.sinks * cache.num_kv_heads * cache.head_dim if self._rotates else 0

    def layer_insertion(self) -> Any:
        from model_defs.cache_observation import CacheObservation

        return CacheObservation(None, num_pools=len(self.named_pools), needs_positions=self._rotates)

    def make_state(self, memory: EngineMemory) -> PolicyState:
        if not self._rotates:
            return super().make_state(memory)
        from kvforge.kv_policies.eviction.sink_rotation import RotatedSinks

        return RotatedSinks(self, memory, self.sinks)
