"""The step inputs of sequences whose queries are observed, written into buffers that are allocated once."""

import numpy as np
import torch
from torch import Tensor

from kvforge.kv_policies.state import SlotTables


class ObservationInputs:
    """Builds ``Eviction.state_inputs`` from rows of the slot table, without per-row Python work."""

    def __init__(self, page_size: int, max_num_seqs: int, max_state_pages: int) -> None:
        self._page_size = page_size
        self._columns = torch.zeros(2, max_num_seqs, dtype=torch.int32)
        self._table = torch.zeros(max_num_seqs * max_state_pages, dtype=torch.int32)

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """Return the inputs of the sequences in ``rows`` [S]; () if none of their queries is observed. Views of the
        buffers."""
        observe_from = slots.columns["observe_from"][rows]
        start = slots.num_computed[rows]
        cached = start + slots.cache_offset[rows]
        is_observed = observe_from < start + num_queries
        if not is_observed.any():
            return ()
        num_seqs = len(rows)
        num_pages = -(-int(((cached + num_queries) * is_observed).max()) // self._page_size)
        observed, scored = (column[:num_seqs] for column in self._columns)
        table = self._table[: num_seqs * num_pages].view(num_seqs, num_pages)
        table.numpy()[:] = np.where(is_observed[:, None], slots.state_table[rows, :num_pages], -1)
        observed.numpy()[:] = np.clip(start + num_queries - observe_from, 0, num_queries)
        scored.numpy()[:] = np.where(start > observe_from, cached, 0)
        return table, observed, scored
