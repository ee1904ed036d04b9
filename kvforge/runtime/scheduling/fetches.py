"""Waiting sequences whose prefix is being read into pages of the pool: numbers, never tensors."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.page_pool import PagePool
from kvforge.runtime.scheduling.prefix_cache import PrefixCache


class Reading(Protocol):
    """Pages on their way."""

    @property
    def num_done(self) -> int:
        """How many of the first are filled."""

    @property
    def is_over(self) -> bool:
        """No more of them will be."""

    def cancel(self) -> None:
        """Fill no more pages, from now on."""


class PageSource(Protocol):
    """Where pages are kept that the pool no longer has, or never had."""

    def stored(self, digests: Iterable[bytes]) -> SequenceOf[bytes]:
        """Return how far the prefix with these digests is there and cheaper to read than to compute."""

    def read(self, digests: SequenceOf[bytes], pages: SequenceOf[int]) -> Reading:
        """Begin to fill pages."""

    def used(self, digests: list[bytes], priority: int | None = None) -> None:
        """Pages are used, or worth this much from now on."""


@dataclass
class Fetch:
    """What a waiting sequence holds: ``pages`` of its prefix, and ``num_reserved`` pages that it will need besides. The
    pages from ``num_known`` on are being read, or are awaited from another's ``reading`` where there are none."""

    pages: list[int]
    num_known: int
    num_reserved: int
    reading: Reading
    num_published: int = 0
    is_over: bool = False


class Fetches:
    """Fetches by sequence. While one lasts, others are admitted, but do not take the slot and the pages that its
    sequence needs; a running sequence that lacks a page takes those of the last one.

    A page is published as soon as it is read, and held until its sequence is about to be admitted.
    """

    def __init__(self, pool: PagePool, cache: PrefixCache, source: PageSource | None) -> None:
        self._pool, self._cache, self.source = pool, cache, source
        self.by_sequence: dict[Sequence, Fetch] = {}
        self.num_tokens = 0
        """Tokens whose K and V were read for a sequence that then took them over."""

    @property
    def is_waiting(self) -> bool:
        """A sequence waits for pages."""
        return any(not fetch.is_over for fetch in self.by_sequence.values())

    def awaits(self, sequence: Sequence) -> bool:
        """This one does."""
        fetch = self.by_sequence.get(sequence)
        return fetch is not None and not fetch.is_over

    def others(self, sequence: Sequence) -> list[Sequence]:
        """Return all sequences but this one that have a fetch."""
        return [other for other in self.by_sequence if other is not sequence]

    def num_reserved(self, sequence: Sequence) -> int:
        """Return the pages that all but this one still need."""
        return sum(self.by_sequence[other].num_reserved for other in self.others(sequence))

    def begin(self, sequence: Sequence, known: list[int], num_needed: int) -> bool:
        """Read on where a prefix in ``known`` pages ends, which then are the fetch's to hold; ``num_needed`` pages more
        are available for the sequence. False where nothing is to be read: it is admitted as it is."""
        if self.source is None or not sequence.may_fetch:
            return False
        start, end = len(known), sequence.num_reusable // self._cache.page_size
        if start == end:
            return False
        shared = self._reading_of(self._cache.digest(sequence, start))
        if shared is not None:
            self.by_sequence[sequence] = Fetch(known, start, num_needed, shared)
            return True
        sequence.may_fetch = False
        digests = self.source.stored(self._cache.digest(sequence, index) for index in range(start, end))
        pages = [page for _ in digests if (page := self._pool.allocate()) is not None]
        if not pages:
            return False
        reading = self.source.read(digests[: len(pages)], pages)
        self.by_sequence[sequence] = Fetch([*known, *pages], start, num_needed - len(pages), reading)
        return True

    def note_use(self, sequence: Sequence, num_pages: int) -> None:
        """A sequence takes over the first pages of its prefix."""
        if self.source is not None and num_pages:
            self.source.used(sequence.digests[:num_pages])

    def note_priorities(self, sequence: Sequence) -> None:
        """The published pages of a sequence have got new priorities."""
        by_priority: dict[int, list[bytes]] = {}
        for index in range(sequence.num_published if self.source is not None else 0):
            page = self._cache.page_of(sequence, index)
            if page is not None:
                by_priority.setdefault(self._pool.priorities[page], []).append(sequence.digests[index])
        for priority, digests in by_priority.items():
            assert self.source is not None
            self.source.used(digests, priority)

    def advance(self) -> None:
        """Publish the pages that were read meanwhile, and end what is over."""
        for sequence, fetch in self.by_sequence.items():
            if fetch.is_over:
                continue
            if fetch.reading.is_over:
                fetch.reading.cancel()
                fetch.is_over = True
            if len(fetch.pages) == fetch.num_known:
                continue
            num_done = fetch.reading.num_done
            for index in range(fetch.num_known + fetch.num_published, fetch.num_known + num_done):
                self._cache.adopt(self._cache.digest(sequence, index), fetch.pages[index])
            fetch.num_published = num_done
            if fetch.is_over:
                self._let_go(fetch, fetch.num_known + num_done)

    def drop(self, sequence: Sequence, is_used: bool = False) -> None:
        """Let go of all that a sequence holds; idempotent."""
        fetch = self.by_sequence.pop(sequence, None)
        if fetch is None:
            return
        if len(fetch.pages) > fetch.num_known and not fetch.is_over:
            fetch.reading.cancel()
        if is_used:
            self.num_tokens += fetch.num_published * self._cache.page_size
        self._let_go(fetch, 0)

    def give_up(self, after: tuple[int, int, int] = (-(2**63), 0, 0)) -> bool:
        """Drop the last fetch of a sequence behind ``after`` in the order; whether there was one."""
        behind = [sequence for sequence in self.by_sequence if sequence.order > after]
        if behind:
            self.drop(max(behind, key=lambda sequence: sequence.order))
        return bool(behind)

    def _reading_of(self, digest: bytes) -> Reading | None:
        """Return what reads a page, where something does."""
        for sequence, fetch in self.by_sequence.items():
            awaited = len(fetch.pages) - fetch.num_known
            if not fetch.is_over and awaited and digest in sequence.digests[fetch.num_known :][:awaited]:
                return fetch.reading
        return None

    def _let_go(self, fetch: Fetch, start: int) -> None:
        for page in reversed(fetch.pages[start:]):
            self._pool.release(page, keep=self._cache.holds(page))
        fetch.num_reserved += len(fetch.pages) - start
        del fetch.pages[start:]
