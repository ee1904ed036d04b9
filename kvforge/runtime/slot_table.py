"""One preallocated row per running sequence: what a decode step needs, readable for all rows at once."""

import numpy as np


class SlotTable:
    """Rows of running sequences (numpy, on the host).

    Attributes:
        page_table: [num_slots, max_pages] int32, physical page per logical page; entries past a
            sequence's pages are stale and never read.
        num_computed: [num_slots] int32, tokens whose K,V are written.
        next_token: [num_slots] int32, the token at position ``num_computed`` of a decoding sequence.
        cache_shift: [num_slots] int32, the sequence's; 0 unless its prompt is factored.
        shadow_table: [num_slots, max_shadow_pages] int32, as ``page_table``.
        num_chunks, num_selected: [num_slots] int32, chunks of a factored prompt and how many of them attention sees
            in a step; 0 for others.
    """

    def __init__(self, num_slots: int, max_pages: int, max_shadow_pages: int = 1) -> None:
        self.page_table = np.zeros((num_slots, max_pages), dtype=np.int32)
        self.num_computed = np.zeros(num_slots, dtype=np.int32)
        self.next_token = np.zeros(num_slots, dtype=np.int32)
        self.cache_shift = np.zeros(num_slots, dtype=np.int32)
        self.shadow_table = np.zeros((num_slots, max_shadow_pages), dtype=np.int32)
        self.num_chunks = np.zeros(num_slots, dtype=np.int32)
        self.num_selected = np.zeros(num_slots, dtype=np.int32)
        self.free_slots = list(range(num_slots - 1, -1, -1))
