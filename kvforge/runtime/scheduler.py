"""Which tokens of which sequences the next step computes, and in which pages: numbers, never tensors."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.page_pool import PagePool
from kvforge.runtime.prefix_cache import PrefixCache
from kvforge.runtime.sequence import Sequence, Status
from kvforge.runtime.slot_table import SlotTable

_by_order = attrgetter("order")


@dataclass
class Schedule:
    """One step's work: sequences with one token to compute, then chunks of sequences with several.

    ``budget`` is what is left of the step's tokens. A chunk that does not reach its sequence's end has no
    survivor.
    """

    budget: int
    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    num_preempted: int = 0

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def num_tokens(self) -> int:
        """Packed tokens of the step."""
        return len(self.decodes) + sum(count for _, count in self.prefills)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step, in the step's order."""
        return self.decodes + [sequence for sequence, _ in self.prefills]

    @property
    def survivors(self) -> list[Sequence]:
        """Sequences whose last token is computed, in the step's order; they get a new token."""
        return self.decodes + [s for s, n in self.prefills if s.num_computed + n == s.length]

    def drop(self, sequence: Sequence) -> None:
        """Take a preempted sequence out and give its tokens back to the budget."""
        if sequence in self.decodes:
            self.decodes.remove(sequence)
            self.budget += 1
        for entry in [entry for entry in self.prefills if entry[0] is sequence]:
            self.prefills.remove(entry)
            self.budget += entry[1]


class Scheduler:
    """Continuous batching with chunked prefill (Split-Fuse) over a paged K,V pool.

    A step takes the decode tokens of running sequences first, then chunks of running prompts, then admits
    waiting sequences, all within ``max_num_tokens``. Order is (priority, arrival, index) throughout. When a
    running sequence needs a page and none is left, the last running sequence in that order loses its pages
    and is computed again later (its tokens stay). The first one in order is never the victim of another, and
    every sequence alone fits the pool, so there is always progress.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.prefix_cache = PrefixCache(config.page_size)
        self.pool = PagePool(config.num_pages, evict=self.prefix_cache.forget)
        self.slots = SlotTable(config.max_num_seqs, config.max_pages_per_seq)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_reused_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_by_order)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out in any state and let go of its pages and slot; idempotent."""
        if sequence.status is Status.RUNNING:
            self._remove(self.running, sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self._remove(self.waiting, sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> Schedule:
        """Plan one step; the plan is empty only if nothing can run before a sequence is added or finished."""
        plan = Schedule(self.config.max_num_tokens)
        for sequence in list(self.running):
            if plan.budget == 0:
                break
            if sequence.status is Status.RUNNING and sequence.length - sequence.num_computed == 1:
                self._plan(plan, sequence, 1)
        for sequence in list(self.running):
            if plan.budget == 0:
                break
            if sequence.status is Status.RUNNING and (left := sequence.length - sequence.num_computed) > 1:
                self._plan(plan, sequence, min(left, plan.budget))
        if plan.num_preempted == 0:
            while plan.budget > 0 and (admitted := self._admit(plan)) is not None:
                self._plan(plan, admitted, min(admitted.length - admitted.num_computed, plan.budget))
        return plan

    def commit(self, plan: Schedule) -> None:
        """Record that a step has written all planned K,V; publish the pages that are now full."""
        slots, page_size = self.slots, self.config.page_size
        publish = self.config.enable_prefix_cache
        if plan.decodes:
            slots.num_computed[[s.slot for s in plan.decodes]] += 1
        for sequence in plan.decodes:
            sequence.num_computed += 1
            sequence.prompt_done = True
            if publish and sequence.num_computed % page_size == 0:
                self.prefix_cache.publish(sequence)
        for sequence, num_tokens in plan.prefills:
            sequence.num_computed += num_tokens
            sequence.prompt_done = sequence.prompt_done or sequence.num_computed >= sequence.num_prompt_tokens
            slots.num_computed[sequence.slot] = sequence.num_computed
            if publish:
                self.prefix_cache.publish(sequence)

    def append(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Add each running sequence's new token."""
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
        self.slots.next_token[[s.slot for s in sequences]] = np.asarray(tokens, dtype=np.int32)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the K,V of ``num_tokens`` tokens."""
        return -(-num_tokens // self.config.page_size)

    def _plan(self, plan: Schedule, sequence: Sequence, num_tokens: int) -> None:
        if not self._grow(plan, sequence, sequence.num_computed + num_tokens):
            return
        plan.budget -= num_tokens
        if sequence.num_computed + num_tokens == sequence.length and num_tokens == 1:
            plan.decodes.append(sequence)
        else:
            plan.prefills.append((sequence, num_tokens))

    def _grow(self, plan: Schedule, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence pages for ``num_tokens`` tokens; False if it was preempted itself."""
        pages = sequence.pages
        row = self.slots.page_table[sequence.slot]
        while len(pages) * self.config.page_size < num_tokens:
            is_new = bool(self.pool.free_pages)
            page = self.pool.allocate()
            if page is None:
                victim = self.running[-1]
                self._preempt(plan, victim)
                plan.num_preempted += 1
                if victim is sequence:
                    return False
                continue
            row[len(pages)] = page
            pages.append(page)
            sequence.metrics.num_allocated_pages += 1
            sequence.metrics.num_new_pages += is_new
        return True

    def _preempt(self, plan: Schedule, victim: Sequence) -> None:
        plan.drop(victim)
        self._remove(self.running, victim)
        self._release(victim)
        victim.status = Status.WAITING
        insort(self.waiting, victim, key=_by_order)
        self.num_preemptions += 1
        victim.metrics.num_preemptions += 1

    def _admit(self, plan: Schedule) -> Sequence | None:
        """Move the first waiting sequence to running if a slot and pages for all its tokens are there.

        Sequences of a strictly worse priority make room for it. Nothing overtakes the first one, except that
        sequences waiting for their leader's prompt are passed over.
        """
        sequence = next((s for s in self.waiting if not s.waits_for_leader), None)
        if sequence is None:
            return None
        while not self._place(sequence):
            victim = self.running[-1] if self.running else None
            if victim is None or victim.order[0] <= sequence.order[0]:
                return None
            self._preempt(plan, victim)
        return sequence

    def _place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and its reusable pages, if the rest of its pages are available."""
        if not self.slots.free_slots:
            return False
        reused = self._reusable_pages(sequence)
        for page in reused:
            self.pool.share(page)
        needed = self.pages_for(sequence.length) - len(reused)
        # What running prompts still need, and a page for each running sequence to grow into.
        reserved = sum(1 + self.pages_for(s.length) - len(s.pages) for s in self.running)
        if needed + reserved > self.pool.num_available:
            self._let_go(reused)
            return False
        self._remove(self.waiting, sequence)
        insort(self.running, sequence, key=_by_order)
        sequence.status = Status.RUNNING
        sequence.slot = self.slots.free_slots.pop()
        sequence.pages = reused
        sequence.num_computed = len(reused) * self.config.page_size
        self.slots.page_table[sequence.slot, : len(reused)] = reused
        self.slots.num_computed[sequence.slot] = sequence.num_computed
        self.slots.next_token[sequence.slot] = sequence.tokens[sequence.length - 1]
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.metrics.num_reused_pages += len(reused)
        self.num_reused_tokens += sequence.num_computed
        return True

    def _reusable_pages(self, sequence: Sequence) -> list[int]:
        """Written pages that hold the K,V of this sequence's first tokens, from the cache or a sibling."""
        best = self.prefix_cache.lookup(sequence) if self.config.enable_prefix_cache else []
        for other in sequence.siblings:
            if other is not sequence and other.status is Status.RUNNING:
                shared = min(other.num_computed, sequence.num_prompt_tokens, sequence.length - 1)
                if shared // self.config.page_size > len(best):
                    best = other.pages[: shared // self.config.page_size]
        return best

    def _release(self, sequence: Sequence) -> None:
        self._let_go(sequence.pages)
        sequence.pages = []
        sequence.num_computed = sequence.num_published = 0
        self.slots.free_slots.append(sequence.slot)
        sequence.slot = -1

    def _let_go(self, pages: list[int]) -> None:
        # Deepest first, so that the cache evicts the end of a prefix before its beginning.
        for page in reversed(pages):
            self.pool.release(page, keep=self.prefix_cache.holds(page))

    @staticmethod
    def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
        del ordered[bisect_left(ordered, sequence.order, key=_by_order)]
