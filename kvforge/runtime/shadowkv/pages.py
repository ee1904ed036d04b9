"""Who has which shadow pages, and which sequences' prompts are factored: numbers, never tensors."""

from kvforge.kv_policies import ShadowKV
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.sequence import Sequence
from kvforge.runtime.slot_table import SlotTable


class ShadowPages:
    """Shadow pages 0 .. num_shadow_pages-1, each free or held by one running sequence.

    A sequence whose prompt will be factored has all of its shadow pages from its admission until it is finished or
    preempted, so that factoring never lacks any. Engines with another policy than ShadowKV have none.
    """

    def __init__(self, config: RuntimeConfig, slots: SlotTable) -> None:
        self._policy = config.kv_policy if isinstance(config.kv_policy, ShadowKV) else None
        self._page_size = config.page_size
        self._slots = slots
        self.num_pages = config.num_shadow_pages
        self.free_pages = list(range(config.num_shadow_pages - 1, -1, -1))
        self.num_factored = 0
        """Prompts factored so far, again after a preemption counted again."""

    @property
    def num_used(self) -> int:
        """Pages with a holder."""
        return self.num_pages - len(self.free_pages)

    def add(self, sequence: Sequence) -> None:
        """Note whether a new sequence's prompt will be factored."""
        if self._policy is not None:
            length = sequence.num_prompt_tokens
            sequence.compact_shift = self._policy.compact_length(length) - length

    def needed(self, sequence: Sequence) -> int:
        """Return the pages of a sequence while it runs."""
        return -(-sequence.num_prompt_tokens // self._page_size) if sequence.compact_shift < 0 else 0

    def take(self, sequence: Sequence) -> None:
        """Give a sequence that has just got its slot its pages; they must be there."""
        if count := self.needed(sequence):
            sequence.shadow_pages = [self.free_pages.pop() for _ in range(count)]
            self._slots.shadow_table[sequence.slot, :count] = sequence.shadow_pages

    def factor(self, sequence: Sequence) -> None:
        """From now on the sequence's pages are those of its compact cache."""
        assert self._policy is not None
        sequence.cache_shift = sequence.compact_shift
        self._slots.cache_shift[sequence.slot] = sequence.cache_shift
        self._slots.num_chunks[sequence.slot] = self._policy.num_chunks(sequence.num_prompt_tokens)
        self._slots.num_selected[sequence.slot] = self._policy.num_selected(sequence.num_prompt_tokens)
        self.num_factored += 1

    def give_back(self, sequence: Sequence) -> None:
        """Take the pages of a sequence that still has its slot; its prompt is not factored any more."""
        self.free_pages += sequence.shadow_pages
        sequence.shadow_pages = []
        if sequence.cache_shift:
            sequence.cache_shift = 0
            for column in (self._slots.cache_shift, self._slots.num_chunks, self._slots.num_selected):
                column[sequence.slot] = 0
