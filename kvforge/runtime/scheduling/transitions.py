"""Changes of sequences' caches between two steps: numbers, never tensors."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kvforge.kv_policies.policy import has_transitions
from kvforge.kv_policies.transition import Transition
from kvforge.runtime.requests.sequence import NEVER, Sequence, Status
from kvforge.runtime.scheduling.holdings import Holdings
from kvforge.runtime.scheduling.probes import Probes
from kvforge.runtime.scheduling.schedule import Schedule


class Transitions:
    """At positions of a KV policy's own (``next_transition``) a sequence gives up pages for those of its changed cache,
    of which there are fewer. What such a sequence loses when it is preempted is computed again in the same pieces.
    """

    def __init__(self, holdings: Holdings, probes: Probes | None) -> None:
        self._holdings, self._policy, self._probes = holdings, holdings.policy, probes
        self.is_used = has_transitions(holdings.policy)
        self._rewrites_pages = holdings.policy.keeping.rewrites_pages
        self.measure: Callable[[Sequence], SequenceOf[int]] | None = None
        """``MeasuringState.measure``, where the policy's state is one: until it is set, everything is kept."""
        self.num_planned = 0
        """Changes of a sequence's cache so far; again after a preemption counted again."""

    def add(self, sequence: Sequence) -> None:
        """Note when the cache of a new sequence changes first, and what it may take over until then."""
        if self.is_used:
            first = self._policy.next_transition(sequence.num_prompt_tokens, 0)
            sequence.first_transition = sequence.next_transition = NEVER if first is None else first
            reusable = self._policy.max_reusable(sequence.num_prompt_tokens)
            sequence.max_reusable = NEVER if reusable is None else reusable

    def plan(self, plan: Schedule) -> None:
        """Change the cache of every sequence that is due. Where kept pages are rewritten, all copies are allocated
        before any page is given up: no transition of the step writes what another one reads."""
        probes = self._probes
        due = [one for one in self._holdings.running if one.is_due and not (probes and probes.awaits(plan, one))]
        kept = {sequence: self._kept_pages(sequence) for sequence in due}
        copies: dict[Sequence, dict[int, int]] = {}
        for sequence in due if self._rewrites_pages else ():
            if sequence.status is Status.RUNNING:
                copies[sequence] = self._take_copies(plan, sequence, kept[sequence])
        for sequence in due:
            if sequence.status is Status.RUNNING:
                self._change(plan, sequence, kept[sequence], copies.get(sequence, {}))

    def _take_copies(self, plan: Schedule, sequence: Sequence, kept: SequenceOf[int]) -> dict[int, int]:
        """Return new pages by the indices of those pages that a transition would rewrite though others hold them or may
        take them over; the sequence holds them behind its own until then. Published pages for whose copies there is no
        room are unpublished instead. Empty if the sequence was preempted itself."""
        pool, prefix_cache = self._holdings.pool, self._holdings.prefix_cache
        copies: dict[int, int] = {}
        for index in kept:
            page = sequence.pages[index]
            is_shared = pool.ref_counts[page] > 1
            if not (is_shared or prefix_cache.holds(page)):
                continue
            copy = pool.allocate()
            while copy is None and is_shared:
                if not self._holdings.make_room(plan, sequence):
                    return {}
                is_shared = pool.ref_counts[page] > 1
                copy = pool.allocate()
            if copy is None:
                prefix_cache.forget(page)
            else:
                copies[index] = copy
                sequence.pages.append(copy)
        return copies

    def _kept_pages(self, sequence: Sequence) -> SequenceOf[int]:
        if self.measure is not None:
            return self.measure(sequence)
        page_size = self._holdings.config.page_size
        return self._policy.kept_pages(sequence.num_prompt_tokens, sequence.num_computed, page_size)

    def _change(self, plan: Schedule, sequence: Sequence, kept: SequenceOf[int], copies: dict[int, int]) -> None:
        """Exchange a sequence's pages for those of its cache after a transition, and have this done. ``copies`` are at
        the end of its pages, to take the places of those that they are copies of."""
        holdings, slots = self._holdings, self._holdings.slots
        num_prompt, num_computed = sequence.num_prompt_tokens, sequence.num_computed
        if sequence.cache_offset == 0:
            holdings.set_priorities(sequence)
        old_pages = sequence.pages[: len(sequence.pages) - len(copies)]
        kept = [index for index in kept if index < len(old_pages)]
        given_up = set(range(len(old_pages))).difference(kept).union(copies)
        holdings.let_go([old_pages[index] for index in sorted(given_up)])
        sequence.pages = [copies.get(index, old_pages[index]) for index in kept]
        slots.page_table[sequence.slot, : len(sequence.pages)] = sequence.pages
        if self._rewrites_pages:  # what it has not published by now, it never will
            sequence.num_published = max(sequence.num_published, num_computed // holdings.config.page_size)
        if self.measure is not None:
            sequence.cache_offset -= (len(old_pages) - len(kept)) * holdings.config.page_size
        else:
            sequence.cache_offset = self._policy.num_cached(num_prompt, num_computed) - num_computed
        slots.cache_offset[sequence.slot] = sequence.cache_offset
        holdings.set_columns(sequence)
        following = self._policy.next_transition(num_prompt, num_computed + 1)
        sequence.next_transition = NEVER if following is None else following
        self.num_planned += 1
        if holdings.grow(plan, sequence, num_computed + sequence.cache_offset):
            plan.transitions[sequence] = Transition(sequence, tuple(old_pages))
