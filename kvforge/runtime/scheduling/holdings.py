"""Who waits and who runs, and the slots and pages that running sequences hold: numbers, never tensors."""

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.scheduling.exact_pages import ExactPages
from kvforge.runtime.scheduling.fetches import Fetches, PageSource
from kvforge.runtime.scheduling.page_pool import PagePool
from kvforge.runtime.scheduling.prefix_cache import PrefixCache
from kvforge.runtime.scheduling.retention import set_priorities
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.runtime.scheduling.state_pages import StatePages
from kvforge.runtime.scheduling.state_rows import StateRows
from kvforge.runtime.scheduling.upper_pages import UpperPages

_by_order = attrgetter("order")


class Holdings:
    """Queues in order (priority, arrival, index), and what running sequences hold.

    When a running sequence needs a page and none is left, the last running sequence in that order loses its pages and
    is computed again later (its tokens stay). The first one in order is never the victim of another, and every sequence
    alone fits the pool, so there is always progress.
    """

    def __init__(self, config: RuntimeConfig, source: PageSource | None) -> None:
        self.config, self.policy = config, config.kv_policy
        self.prefix_cache = PrefixCache(config.page_size, root=str(config.kv_policy))
        self.pool = PagePool(config.num_pages, evict=self._evicted)
        self.fetches = Fetches(self.pool, self.prefix_cache, source)
        self._columns, is_sealed = self.policy.keeping.slot_columns, self.policy.sealing is not None
        max_pages = config.max_pages_per_seq, config.max_state_pages_per_seq
        max_upper_pages = config.max_pages_per_seq if config.visibility else 0
        self.slots = SlotTable(config.max_num_seqs, *max_pages, self._columns, is_sealed, max_upper_pages)
        self.upper_pages = UpperPages(config, self.slots, self.pool, self.prefix_cache)
        self.state_pages = StatePages(config, self.slots)
        self.exact_pages = ExactPages(config, self.slots)
        self.state_rows = StateRows(config, self.slots, self.prefix_cache)
        self.give_back: list[Callable[[Sequence], None]] = [
            self.state_pages.give_back,
            self.exact_pages.give_back,
            self.upper_pages.give_back,
            self.state_rows.give_back,
        ]
        """Called for what a running sequence has, while it still has its slot."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.awaited: dict[Sequence, int] = {}
        """Sequences whose next token a step in flight computes, and how many of their tokens are known."""

    def _evicted(self, page: int) -> None:
        """Unpublish a page, because it is about to be overwritten."""
        self.prefix_cache.forget(page)
        self.upper_pages.lower_evicted(page)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the K,V of ``num_tokens`` tokens."""
        return -(-num_tokens // self.config.page_size)

    def covered(self, sequence: Sequence) -> int:
        """Return for how many cached tokens the pages of a running sequence are enough."""
        below, above = len(sequence.pages) * self.config.page_size, self.upper_pages.covered(sequence)
        return below if above is None else min(below, above)

    def missing_pages(self, sequence: Sequence) -> int:
        """What a running sequence still needs for the tokens that it has, and a page to grow into."""
        return 1 + self.needed_pages(sequence, sequence.pages)

    def needed_pages(self, sequence: Sequence, pages: list[int]) -> int:
        """Pages that a sequence with ``pages`` takes for all its tokens, less those that it gives up before."""
        length, change = sequence.length, sequence.next_transition
        if change > length:
            return self.pages_for(length + sequence.cache_offset) - len(pages)
        kept_by_others = sum(self.pool.ref_counts[page] > 1 for page in pages)
        before = self.pages_for(change + sequence.cache_offset) - len(pages)
        maximum = self.policy.max_cached(sequence.num_prompt_tokens, length, change)
        return max(before, self.pages_for(maximum) - (len(pages) - kept_by_others))

    def grow(self, plan: Schedule, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence pages for ``num_tokens`` cached tokens; False if it was preempted itself."""
        while not self.extend(sequence, num_tokens):
            if not self.make_room(plan, sequence):
                return False
        return True

    def make_room(self, plan: Schedule, sequence: Sequence) -> bool:
        """Take pages from the last that is read for a waiting sequence, or from the last running one; False if that
        was ``sequence``."""
        if self.fetches.give_up():
            return True
        victim = self.running[-1]
        self.preempt(plan, victim)
        plan.num_preempted += 1
        return victim is not sequence

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence pages for ``num_tokens`` cached tokens; False if too few are left, those then are
        its."""
        pages, pool = sequence.pages, self.pool
        while len(pages) * self.config.page_size < num_tokens:
            is_new = bool(pool.free_pages)
            page = pool.allocate()
            if page is None:
                return False
            self.slots.page_table[sequence.slot, len(pages)] = page
            self.exact_pages.take(sequence, len(pages))
            pages.append(page)
            sequence.metrics.num_allocated_pages += 1
            sequence.metrics.num_new_pages += is_new
        if self.upper_pages.extend(sequence, num_tokens):
            return True
        keep = self.pages_for(self.covered(sequence))
        self.let_go(pages[keep:])
        del pages[keep:]
        return False

    def preempt(self, plan: Schedule, victim: Sequence) -> None:
        """Take a running sequence's slot and pages, and queue it again."""
        plan.drop(victim)
        self.remove(self.running, victim)
        self.release(victim)
        victim.may_fetch = True
        self.wait(victim)
        self.num_preemptions += 1
        victim.metrics.num_preemptions += 1

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence that holds nothing."""
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_by_order)

    def run(self, sequence: Sequence, pages: list[int], upper_pages: list[int]) -> None:
        """Give a waiting sequence a slot, state pages, which must be there, and the ``pages`` of its prefix, with those
        above a blind cut."""
        slots = self.slots
        self.remove(self.waiting, sequence)
        insort(self.running, sequence, key=_by_order)
        sequence.status = Status.RUNNING
        sequence.slot = slots.free_slots.pop()
        sequence.pages = pages
        sequence.num_computed = len(pages) * self.config.page_size
        self.state_pages.take(sequence)
        self.upper_pages.run(sequence, upper_pages)
        self.state_rows.take(sequence)
        slots.page_table[sequence.slot, : len(pages)] = pages
        slots.num_computed[sequence.slot] = sequence.num_computed
        slots.next_token[sequence.slot] = sequence.tokens[sequence.length - 1]
        self.set_columns(sequence)

    def set_columns(self, sequence: Sequence) -> None:
        """Note the policy's numbers of a sequence that has just got its slot, or a changed cache."""
        if self._columns:
            values = self.policy.keeping.slot_values(sequence.num_prompt_tokens, sequence.num_computed)
            for name, value in zip(self._columns, values, strict=True):
                self.slots.columns[name][sequence.slot] = value

    def release(self, sequence: Sequence) -> None:
        """Take all that a sequence has that ran until now."""
        if sequence.cache_offset == 0:
            self.set_priorities(sequence)
        self.let_go(sequence.pages)
        sequence.pages = []
        for give_back in self.give_back:
            give_back(sequence)
        sequence.cache_offset = 0
        for column in (self.slots.cache_offset, *self.slots.columns.values()):
            column[sequence.slot] = 0
        sequence.next_transition = sequence.first_transition
        sequence.num_computed = sequence.num_published = 0
        self.slots.free_slots.append(sequence.slot)
        sequence.slot = -1

    def set_priorities(self, sequence: Sequence) -> None:
        """Give the pages of a sequence that asks for it their priorities, before it lets go of them."""
        if sequence.params.retention and self.config.enable_prefix_cache:
            set_priorities(self.pool, self.prefix_cache, sequence)
            self.upper_pages.set_priorities()
            self.fetches.note_priorities(sequence)

    def unpublish(self, sequence: Sequence) -> None:
        """Offer the pages of a sequence's tokens to nobody any more: what a step computed of them is not to be
        trusted."""
        for index in range(len(sequence.digests)):
            page = self.prefix_cache.page_of(sequence, index)
            if page is not None:
                if self.pool.ref_counts[page] == 0:
                    self.pool.discard(page)
                self._evicted(page)

    def let_go(self, pages: list[int]) -> None:
        """Take a holder from each page, deepest first, so that the cache evicts the end of a prefix before its
        beginning."""
        for page in reversed(pages):
            self.pool.release(page, keep=self.prefix_cache.holds(page))

    @staticmethod
    def remove(ordered: list[Sequence], sequence: Sequence) -> None:
        """Take a sequence out of a queue that it is in."""
        del ordered[bisect_left(ordered, sequence.order, key=_by_order)]
