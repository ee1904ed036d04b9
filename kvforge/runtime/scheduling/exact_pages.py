"""Who has which exact page where a KV policy seals pages: numbers, never tensors."""

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable


class ExactPages:
    """Exact pages 0 .. num_exact_pages-1, each free or held by one sequence for one of its logical pages. None where
    the policy seals nothing.

    A sequence has one for each logical page that it computes tokens of, until all tokens of that page are computed and
    can not be taken back. Between steps that is at most one, and a step of T tokens touches at most T / page_size pages
    and two more of each sequence: ``Sealing.num_exact_pages`` are always enough.
    """

    def __init__(self, config: RuntimeConfig, slots: SlotTable) -> None:
        self._page_size, self._slots = config.page_size, slots
        self.is_used = config.kv_policy.sealing is not None
        self.num_pages = config.num_exact_pages
        self.held: dict[Sequence, dict[int, int]] = {}
        """Of running sequences, by logical page, those that are not sealed for good."""
        self.free_pages = list(range(config.num_exact_pages - 1, -1, -1))

    def take(self, sequence: Sequence, index: int) -> None:
        """Give a sequence an exact page for its logical page ``index``, which it has just got."""
        if self.is_used:
            self.held.setdefault(sequence, {})[index] = page = self.free_pages.pop()
            self._slots.write_table[sequence.slot, index] = page

    def cover(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence those that it lacks to compute its tokens up to ``num_tokens``."""
        for index in range(sequence.num_computed // self._page_size, -(-num_tokens // self._page_size)):
            if index not in self.held.get(sequence, ()):
                self.take(sequence, index)

    def trim(self, sequence: Sequence) -> None:
        """Take back all exact pages of a sequence but that of its page that is not full."""
        newest, offset = divmod(sequence.num_computed, self._page_size)
        kept, held = newest if offset else -1, self.held.get(sequence, {})
        for index in [index for index in held if index != kept]:
            self.free_pages.append(held.pop(index))

    def commit(self, plan: Schedule) -> None:
        """Take back those of pages that a step has filled. Those under drafts stay until it is known which are
        accepted."""
        for sequence in plan.sequences:
            if not (sequence in plan.drafts or sequence in plan.draft_limits):
                self.trim(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Take back all of them."""
        self.free_pages += self.held.pop(sequence, {}).values()
