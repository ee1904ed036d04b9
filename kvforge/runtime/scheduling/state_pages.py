"""Who has which pages of the KV policy's own: numbers, never tensors."""

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.slot_table import SlotTable


class StatePages:
    """State pages 0 .. num_state_pages-1, each free or held by one running sequence.

    A sequence has all of its state pages from its admission until it is finished or preempted, so that a transition
    never lacks any.
    """

    def __init__(self, config: RuntimeConfig, slots: SlotTable) -> None:
        self._policy, self._page_size, self._slots = config.kv_policy, config.page_size, slots
        self.num_pages = config.num_state_pages
        self.free_pages = list(range(config.num_state_pages - 1, -1, -1))

    @property
    def num_used(self) -> int:
        """Pages with a holder."""
        return self.num_pages - len(self.free_pages)

    def needed(self, sequence: Sequence) -> int:
        """Return the pages of a sequence while it runs."""
        if self.num_pages == 0:
            return 0
        return self._policy.keeping.num_state_pages(sequence.num_prompt_tokens, self._page_size)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence that has just got its slot its pages; they must be there."""
        if count := self.needed(sequence):
            sequence.state_pages = [self.free_pages.pop() for _ in range(count)]
            self._slots.state_table[sequence.slot, :count] = sequence.state_pages

    def give_back(self, sequence: Sequence) -> None:
        """Take the pages of a sequence that still has its slot."""
        self.free_pages += sequence.state_pages
        sequence.state_pages = []
