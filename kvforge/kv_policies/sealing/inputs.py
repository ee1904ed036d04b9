"""The step input of sequences whose pages are sealed."""

import numpy as np
import torch
from torch import Tensor

from kvforge.kv_policies.state import SlotTables


class ExactTable:
    """Builds ``SealedPages.state_inputs``: as many columns as the step's page table has."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def build(self, rows: np.ndarray, slots: SlotTables, num_queries: np.ndarray) -> tuple[Tensor, ...]:
        """See ``InputBuilder``."""
        longest = int((slots.num_computed[rows] + num_queries).max())
        return (torch.from_numpy(slots.write_table[rows, : -(-longest // self._page_size)]),)
