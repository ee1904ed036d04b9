"""Who has which page of the owners above a blind cut: numbers, never tensors."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.page_pool import PagePool
from kvforge.runtime.scheduling.prefix_cache import PrefixCache
from kvforge.runtime.scheduling.slot_table import SlotTable


class UpperPages:
    """Upper pages 0 .. num_upper_pages-1, which hold K and V of the tokens that go past a blind cut. None with any
    other cut.

    Anchors fill whole pages. A page of them belongs to the page of ``below`` with the same tokens, and shares its fate:
    who holds one holds the other, both are cached or neither is, and the first one to be evicted takes the other along.
    All other upper pages are a sequence's own.
    """

    def __init__(self, config: RuntimeConfig, slots: SlotTable, below: PagePool, prefix_cache: PrefixCache) -> None:
        self._page_size, self._slots, self._below, self._cache = config.page_size, slots, below, prefix_cache
        self._visibility = config.visibility
        self._num_shared = 0 if config.visibility is None else config.visibility.num_anchors // config.page_size
        self.pool = PagePool(config.num_upper_pages, evict=self._evicted)
        self.above: dict[int, int] = {}
        """Of lower pages with anchors, held or cached, the upper ones with the same tokens."""
        self._lower_of: dict[int, int] = {}

    @property
    def is_used(self) -> bool:
        """There is a blind cut."""
        return self._visibility is not None

    def pages_for(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the upper pages of a sequence of which so many tokens are computed."""
        if self._visibility is None:
            return 0
        return -(-self._visibility.num_seen(sequence.num_prompt_tokens, num_tokens) // self._page_size)

    def covered(self, sequence: Sequence) -> int | None:
        """Return for how many tokens the upper pages of a running sequence are enough; None without a blind cut."""
        if self._visibility is None:
            return None
        num_slots, visibility = len(sequence.upper_pages) * self._page_size, self._visibility
        if num_slots < visibility.num_anchors:
            return num_slots
        return num_slots + visibility.num_hidden(sequence.num_prompt_tokens)

    def has_room(
        self, sequence: Sequence, shared: SequenceOf[int], running: Iterable[Sequence], others: Iterable[Sequence]
    ) -> bool:
        """Whether a waiting sequence that takes over lower pages that it ``shared`` finds the rest of its upper pages,
        and a page to grow into remains for it, for those that run and for ``others`` that wait, with all theirs."""
        if self._visibility is None:
            return True
        needed = self.pages_for(sequence, sequence.length) - min(len(shared), self._num_shared)
        needed += sum(1 + self.pages_for(one, one.length) - len(one.upper_pages) for one in running)
        needed += sum(1 + self.pages_for(one, one.length) for one in others)
        return needed <= self.pool.num_available

    def share(self, shared: SequenceOf[int]) -> list[int]:
        """Add a holder to the upper pages of a prefix with these lower ones, which have just got one; returns them."""
        pages = [self.above[page] for page in shared[: self._num_shared]]
        for page in pages:
            self.pool.share(page)
        return pages

    def run(self, sequence: Sequence, pages: list[int]) -> None:
        """Give a sequence that has just got its slot the upper ``pages`` of its prefix."""
        if self._visibility is not None:
            sequence.upper_pages = pages
            self._slots.upper_table[sequence.slot, : len(pages)] = pages
            self._slots.num_hidden[sequence.slot] = self._visibility.num_hidden(sequence.num_prompt_tokens)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence upper pages for ``num_tokens`` computed tokens, of which it has the lower ones, and note them
        in its slot, where it has one; False if too few are left, those then are its."""
        pages = sequence.upper_pages
        while len(pages) < self.pages_for(sequence, num_tokens):
            page = self.pool.allocate()
            if page is None:
                return False
            index = len(pages)
            if index < self._num_shared:
                self.above[sequence.pages[index]], self._lower_of[page] = page, sequence.pages[index]
            if sequence.slot >= 0:
                self._slots.upper_table[sequence.slot, index] = page
            pages.append(page)
        return True

    def trim(self, sequence: Sequence) -> None:
        """Take back a sequence's upper pages beyond its computed tokens."""
        keep = self.pages_for(sequence, sequence.num_computed)
        self.let_go(sequence.upper_pages[keep:])
        del sequence.upper_pages[keep:]

    def give_back(self, sequence: Sequence) -> None:
        """Take back all of them."""
        self.let_go(sequence.upper_pages)
        sequence.upper_pages = []

    def let_go(self, pages: list[int]) -> None:
        """Take a holder from each page, deepest first."""
        for page in reversed(pages):
            lower = self._lower_of.get(page)
            keep = lower is not None and self._cache.holds(lower)
            self.pool.release(page, keep=keep)
            if lower is not None and not keep and self.pool.ref_counts[page] == 0:
                self._part(page)

    def set_priorities(self) -> None:
        """Give all upper pages of anchors the priorities of the lower ones."""
        for lower, page in self.above.items():
            if self.pool.priorities[page] != self._below.priorities[lower]:
                self.pool.set_priority(page, self._below.priorities[lower])

    def lower_evicted(self, page: int) -> None:
        """Free the upper page of a cached lower one that is evicted."""
        if (upper := self.above.get(page)) is not None:
            self._part(upper)
            self.pool.discard(upper)

    def _evicted(self, page: int) -> None:
        """Unpublish and free the lower page of a cached upper one."""
        lower = self._part(page)
        self._cache.forget(lower)
        self._below.discard(lower)

    def _part(self, page: int) -> int:
        """Take an upper page of anchors from its lower one, and return that."""
        lower = self._lower_of.pop(page)
        del self.above[lower]
        return lower
