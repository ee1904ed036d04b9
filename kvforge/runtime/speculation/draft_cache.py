"""The pages of a draft model: for each sequence that it drafts for a twin, whose K,V are the draft model's own."""

from collections.abc import Container

import numpy as np

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence, Status
from kvforge.runtime.scheduling.page_pool import PagePool
from kvforge.runtime.scheduling.slot_table import SlotTable


class DraftCache:
    """Twins by their sequence, the one unused for longest first.

    A twin holds the tokens of its sequence as of the last ``follow`` and drafts after them; of the first
    ``num_computed`` of these the pages hold the K,V.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.slots = SlotTable(config.max_num_seqs, config.max_pages_per_seq)
        self.twins: dict[Sequence, Sequence] = {}

    def follow(self, sequence: Sequence, num_drafts: int, keep: Container[Sequence]) -> Sequence | None:
        """Return the twin with the sequence's present tokens and pages for these and ``num_drafts`` less one.

        K,V of other tokens than the sequence's are forgotten. Pages that are missing are taken from the twins unused
        for longest, but never from those of sequences in ``keep``; where that is not enough, the twin is let go and
        None returned.
        """
        twin = self.twins.pop(sequence, None) or self._new_twin(sequence, keep)
        if twin is None:
            return None
        self.twins[sequence] = twin
        most = min(twin.num_computed, sequence.length - 1)
        differs = twin.tokens[:most] != sequence.tokens[:most]
        twin.num_computed = int(differs.argmax()) if differs.any() else most
        twin.tokens[twin.num_computed : sequence.length] = sequence.tokens[twin.num_computed : sequence.length]
        twin.length = sequence.length
        self.slots.num_computed[twin.slot] = twin.num_computed
        while len(twin.pages) * self.config.page_size < sequence.length + num_drafts - 1:
            page = self.pool.allocate()
            if page is not None:
                self.slots.page_table[twin.slot, len(twin.pages)] = page
                twin.pages.append(page)
            elif not self._evict(sequence, keep):
                self.forget(sequence)
                return None
        return twin

    def computed(self, twins: list[Sequence], counts: list[int]) -> None:
        """Record that a step has written the K,V of so many more tokens of each twin."""
        for twin, count in zip(twins, counts, strict=True):
            twin.num_computed += count
            self.slots.num_computed[twin.slot] = twin.num_computed

    def append(self, twins: list[Sequence], tokens: list[int]) -> None:
        """Add a draft to each twin."""
        for twin, token in zip(twins, tokens, strict=True):
            twin.append(token)
        self.slots.next_token[[twin.slot for twin in twins]] = np.asarray(tokens, dtype=np.int32)

    def forget(self, sequence: Sequence) -> None:
        """Let go of a sequence's twin; idempotent."""
        twin = self.twins.pop(sequence, None)
        if twin is not None:
            for page in reversed(twin.pages):
                self.pool.release(page, keep=False)
            self.slots.free_slots.append(twin.slot)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every page and slot is free or one twin's, and pages hold what is computed."""
        pool, slots, twins = self.pool, self.slots, list(self.twins.values())
        held = [page for twin in twins for page in twin.pages]
        assert sorted(held + pool.free_pages) == list(range(pool.num_pages)), "pages are lost or held twice"
        assert [pool.ref_counts[page] for page in held] == [1] * len(held), "pages of a twin are shared"
        used = [twin.slot for twin in twins]
        assert sorted(used + slots.free_slots) == list(range(self.config.max_num_seqs)), "slots are lost"
        for sequence, twin in self.twins.items():
            assert sequence.status is not Status.FINISHED, f"{sequence} has finished and keeps its twin"
            assert twin.num_computed <= min(twin.length, len(twin.pages) * self.config.page_size), twin
            assert slots.num_computed[twin.slot] == twin.num_computed, twin
            assert slots.page_table[twin.slot, : len(twin.pages)].tolist() == twin.pages, twin

    def _new_twin(self, sequence: Sequence, keep: Container[Sequence]) -> Sequence | None:
        if not self.slots.free_slots and not self._evict(sequence, keep):
            return None
        nothing = sequence.tokens[:0]
        twin = Sequence(
            sequence.request_id,
            sequence.index,
            sequence.order,
            nothing,
            sequence.params,
            min(sequence.max_length, self.config.max_seq_len + 1),
            RequestMetrics(0, 0),
        )
        twin.slot = self.slots.free_slots.pop()
        return twin

    def _evict(self, sequence: Sequence, keep: Container[Sequence]) -> bool:
        oldest = next((other for other in self.twins if other is not sequence and other not in keep), None)
        if oldest is not None:
            self.forget(oldest)
        return oldest is not None
