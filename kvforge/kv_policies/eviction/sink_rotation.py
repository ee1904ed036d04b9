"""Keys of the first tokens, rotated on as the tokens behind them are evicted."""

from collections.abc import Sequence

import torch

from kvforge.kv_policies.eviction.state import EvictionState, Rule
from kvforge.kv_policies.state import EngineMemory
from kvforge.kv_policies.transition import Transition
from model_defs.cache_access import read_keys, write_keys
from model_defs.rope import apply_rope


class RotatedSinks(EvictionState):
    """Rotates the keys of a sequence's first ``num_sinks`` tokens, which no eviction moves, by as many positions as it
    has evicted, each time from the keys as they were written."""

    def __init__(self, rule: Rule, memory: EngineMemory, num_sinks: int) -> None:
        super().__init__(rule, memory)
        self._num_sinks = num_sinks
        self._cos, self._sin = memory.rope_tables()

    def _evict(self, transitions: Sequence[Transition]) -> None:
        super()._evict(transitions)
        is_first = self._shape(transitions[0])[0] == 0
        index = range(self._num_sinks)
        numbers = [[one.sequence.pages[i // self._page_size] for i in index] for one in transitions]
        pages = torch.tensor(numbers, device=self._device)
        places = torch.tensor([i % self._page_size for i in index], device=self._device)
        slots = torch.tensor([one.sequence.slot for one in transitions], device=self._device)
        evicted = [one.sequence.num_computed - self._rule.calendar.kept for one in transitions]
        cos, sin = (table[evicted][:, None] for table in (self._cos, self._sin))
        for cache, state, (k_scale, _) in zip(self._caches, self._states, self._scales, strict=True):
            if is_first:
                state[-1][slots] = read_keys(cache, pages, places, k_scale)
            write_keys(cache, pages, places, apply_rope(state[-1][slots], cos, sin), k_scale)
