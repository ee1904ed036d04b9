"""The step inputs of sequences that read chunks of their prompts, written into buffers that are allocated once."""

import numpy as np
import torch
from torch import Tensor

from kvforge.kv_policies.state import SlotTables


class ChunkInputs:
    """Builds ``Quest.state_inputs`` from rows of the slot table, without per-row Python work."""

    def __init__(self, chunk_size: int, page_size: int, max_num_seqs: int, max_state_pages: int) -> None:
        self._chunk_size, self._page_size = chunk_size, page_size
        self._num_chunks = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._table = torch.zeros(max_num_seqs * max_state_pages, dtype=torch.int32)

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """Return the inputs of the sequences in ``rows`` [S]; () if all of them read everything. Views of the
        buffers."""
        num_chunks = slots.columns["num_chunks"][rows]
        longest = int(num_chunks.max(initial=0))
        if longest == 0:
            return ()
        num_seqs, num_pages = len(rows), -(-longest * self._chunk_size // self._page_size)
        chunks = self._num_chunks[:num_seqs]
        table = self._table[: num_seqs * num_pages].view(num_seqs, num_pages)
        chunks.numpy()[:] = num_chunks
        table.numpy()[:] = slots.state_table[rows, :num_pages] * (num_chunks > 0)[:, None]
        return table, chunks
