"""The step inputs of factored sequences, written into buffers that are allocated once."""

import numpy as np
import torch

from kvforge.kv_policies import ShadowKV
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.shadow_inputs import ShadowTensors
from kvforge.runtime.slot_table import SlotTable


class ShadowInputBuilder:
    """Builds ``ShadowTensors`` from rows of the slot table, without per-row Python work."""

    def __init__(self, config: RuntimeConfig) -> None:
        policy, seqs = config.kv_policy, config.max_num_seqs
        self._tokens_per_chunk = policy.chunk_size if isinstance(policy, ShadowKV) else 0
        self._page_size = config.page_size
        self._columns = torch.zeros(3, seqs, dtype=torch.int32)
        self._table = torch.zeros(seqs * config.max_shadow_pages_per_seq, dtype=torch.int32)

    def build(self, rows: np.ndarray, slots: SlotTable) -> ShadowTensors:
        """Return the inputs of the sequences in ``rows`` [S]; () if none of them is factored. Views of the buffers."""
        num_chunks = slots.num_chunks[rows]
        longest = int(num_chunks.max(initial=0))
        if longest == 0:
            return ()
        num_seqs, num_pages = len(rows), -(-longest * self._tokens_per_chunk // self._page_size)
        is_factored = num_chunks > 0
        slot, chunks, selected = (column[:num_seqs] for column in self._columns)
        table = self._table[: num_seqs * num_pages].view(num_seqs, num_pages)
        slot.numpy()[:] = np.where(is_factored, rows, -1)
        chunks.numpy()[:] = num_chunks
        selected.numpy()[:] = slots.num_selected[rows]
        table.numpy()[:] = slots.shadow_table[rows, :num_pages] * is_factored[:, None]
        return slot, table, chunks, selected
