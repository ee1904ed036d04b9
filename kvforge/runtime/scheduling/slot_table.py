"""One preallocated row per running sequence: what a decode step needs, readable for all rows at once."""

from collections.abc import Iterable

import numpy as np


class SlotTable:
    """Rows of running sequences (numpy, on the host).

    Attributes:
        page_table: [num_slots, max_pages] int32, physical page per logical page; entries past a
            sequence's pages are stale and never read.
        num_computed: [num_slots] int32, tokens whose K,V are written.
        next_token: [num_slots + 1] int32, the token at position ``num_computed`` of a decoding sequence; the last one
            is written for sequences without a slot, and never read.
        cache_offset: [num_slots] int32, the sequence's; 0 unless a transition has changed its cache.
        write_table: [num_slots, max_pages] int32, the page that each logical page is written to: where pages are
            sealed an exact one, as long as it has one, else ``page_table`` itself.
        upper_table: [num_slots, max_upper_pages] int32, as ``page_table``, of pages above a blind cut.
        num_hidden: [num_slots] int32, tokens of the prompt that never go past it.
        state_table: [num_slots, max_state_pages] int32, as ``page_table``, of the KV policy's own pages.
        state_read: [num_slots] int32, the row of the sequence's state behind its computed tokens, -1 at its start; and
        state_write: [num_slots] int32, that of the state behind the last token of a step which is kept, where layers
            keep one.
        columns: by name, [num_slots] int32, the policy's ``slot_columns``; 0 in free rows.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        max_state_pages: int = 1,
        columns: Iterable[str] = (),
        seals_pages: bool = False,
        max_upper_pages: int = 0,
    ) -> None:
        self.page_table = np.zeros((num_slots, max_pages), dtype=np.int32)
        self.write_table = np.zeros_like(self.page_table) if seals_pages else self.page_table
        self.num_computed = np.zeros(num_slots, dtype=np.int32)
        self.next_token = np.zeros(num_slots + 1, dtype=np.int32)
        self.cache_offset = np.zeros(num_slots, dtype=np.int32)
        self.upper_table = np.zeros((num_slots, max_upper_pages), dtype=np.int32)
        self.num_hidden = np.zeros(num_slots, dtype=np.int32)
        self.state_table = np.zeros((num_slots, max_state_pages), dtype=np.int32)
        self.state_read = np.full(num_slots, -1, dtype=np.int32)
        self.state_write = np.full(num_slots, -1, dtype=np.int32)
        self.columns: dict[str, np.ndarray] = {name: np.zeros(num_slots, dtype=np.int32) for name in columns}
        self.free_slots = list(range(num_slots - 1, -1, -1))
