"""The step inputs of sequences whose KV heads keep different numbers of tokens."""

import numpy as np
import torch
from torch import Tensor

from kvforge.kv_policies.state import InputBuilder, SlotTables


class LaneInputs:
    """Adds ``lane_slot`` to the inputs of ``observed``, which is None for rules that observe nothing."""

    def __init__(self, observed: InputBuilder | None, max_num_seqs: int) -> None:
        self._observed = observed
        self._slot = torch.zeros(max_num_seqs, dtype=torch.int32)

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """See ``InputBuilder``. Views of the buffers."""
        is_cut = slots.cache_offset[rows] < 0
        observed = () if self._observed is None else self._observed.build(rows, slots, num_queries)
        if not observed and not is_cut.any():
            return ()
        num_seqs = len(rows)
        if self._observed is not None and not observed:
            nothing = torch.zeros(2, num_seqs, dtype=torch.int32)
            observed = torch.full((num_seqs, 1), -1, dtype=torch.int32), nothing[0], nothing[1]
        slot = self._slot[:num_seqs]
        slot.numpy()[:] = np.where(is_cut, rows, -1)
        return *observed, slot
