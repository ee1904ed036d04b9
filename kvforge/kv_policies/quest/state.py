"""Notes the bounds of a prompt's keys, once it is computed."""

from collections.abc import Sequence

import torch

from kvforge.kv_policies.state import EngineMemory
from kvforge.kv_policies.transition import Transition


class BoundsState:
    """Writes the pools ``bounds``; K and V stay as they are."""

    def __init__(self, chunk_size: int, memory: EngineMemory) -> None:
        self._chunk_size, self._pools = chunk_size, memory.pools
        for *_, never in memory.pools:
            never.zero_()

    def counters(self) -> dict[str, int]:
        return {}

    @torch.inference_mode()
    def apply(self, transitions: Sequence[Transition]) -> None:
        """Note the largest and the smallest number of every dimension in each chunk. Of a chunk that is not whole they
        are of no use, and not used."""
        device = self._pools[0][0].device
        for transition in transitions:
            sequence = transition.sequence
            state_pages = torch.tensor(sequence.state_pages, device=device)
            pages = torch.tensor(sequence.pages[: len(state_pages)], device=device)
            for k_pool, _, bounds, _ in self._pools:
                keys = k_pool[pages].unflatten(1, (-1, self._chunk_size))
                bounds[state_pages] = torch.cat((keys.amax(2), keys.amin(2)), dim=-1)
