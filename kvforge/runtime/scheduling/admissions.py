"""Waiting sequences that a step admits, and where their prefixes come from: numbers, never tensors."""

from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.scheduling.holdings import Holdings
from kvforge.runtime.scheduling.planned_prefixes import PlannedPrefixes
from kvforge.runtime.scheduling.running import RunningWork
from kvforge.runtime.scheduling.schedule import Schedule


class Admissions:
    """Admits waiting sequences in order where all their tokens have room.

    A prompt whose beginning another one computes in the step being planned waits for those pages where that saves it
    work (see ``PlannedPrefixes``). Others may pass it, but not take the slot and the pages that it needs. A prompt of
    which a ``PageSource`` keeps the beginning is not admitted before that is read (see ``Fetches``). Others are, on the
    same terms.
    """

    def __init__(self, holdings: Holdings, work: RunningWork) -> None:
        self._holdings, self._work, self._fetches = holdings, work, holdings.fetches
        self._use_cache, self._measures = holdings.config.enable_prefix_cache, holdings.policy.keeping.keeps_by_content
        self.num_reused_tokens = 0
        self.num_waits = 0
        """Times an admission was put off for pages that a step was about to write."""

    def plan(self, plan: Schedule) -> None:
        """Admit sequences and add their first chunks, or begin to read what the first one is to take over."""
        if plan.num_preempted == 0 and self._holdings.waiting:
            if plan.budget > 0:
                self._admit_all(plan)
            elif self._fetches.source is not None:
                self._read_ahead()

    def _admit_all(self, plan: Schedule) -> None:
        """Nothing overtakes the first one, except that sequences waiting for their leader's prompt, for a token of a
        step in flight, for pages that are being read or for pages of this step are passed over."""
        holdings, index, free_slots = self._holdings, 0, self._holdings.slots.free_slots
        prefixes = PlannedPrefixes(holdings.prefix_cache, holdings.policy, holdings.state_rows)
        if self._use_cache:
            prefixes.replace(plan.prefills)
        plan.num_reserved = sum(map(holdings.missing_pages, holdings.running))
        while plan.budget > 0 and index < len(holdings.waiting):
            sequence = holdings.waiting[index]
            if (
                sequence.waits_for_leader
                or sequence in holdings.awaited
                or self._fetches.awaits(sequence)
                or (len(prefixes.held_back) < len(free_slots) and prefixes.hold_back(sequence, plan.budget))
            ):
                index += 1
            elif not self._admit(plan, sequence, prefixes):
                break
            elif sequence.status is Status.WAITING:
                index += 1
            else:
                count = self._work.plan_chunk(plan, sequence)
                plan.num_reserved += holdings.missing_pages(sequence)
                if self._use_cache:
                    prefixes.add(sequence, count)
        self.num_waits += len(prefixes.held_back)

    def _read_ahead(self) -> None:
        """Begin to read the prefix of the first waiting sequence that may have one, in a step without tokens for it."""
        reserved = sum(map(self._holdings.missing_pages, self._holdings.running))
        for sequence in self._holdings.waiting:
            if sequence.may_fetch and not sequence.waits_for_leader and sequence not in self._fetches.by_sequence:
                self._place(sequence, reserved, {}, admits=False)
                return

    def _admit(self, plan: Schedule, sequence: Sequence, prefixes: PlannedPrefixes) -> bool:
        """Move a waiting sequence to running if a slot and pages for all its tokens are there, or begin to read its
        prefix.

        Sequences of a strictly worse priority make room for it, and those behind it that are being read.
        """
        holdings, held_back = self._holdings, prefixes.held_back
        while not self._place(sequence, plan.num_reserved, held_back):
            if self._fetches.give_up(after=sequence.order):
                continue
            victim = holdings.running[-1] if holdings.running else None
            # Those who are held back wait for what running sequences compute: none of these may go now.
            if victim is None or held_back or victim.order[0] <= sequence.order[0]:
                return False
            plan.num_reserved -= holdings.missing_pages(victim)
            holdings.preempt(plan, victim)
            if self._use_cache:
                prefixes.replace(plan.prefills)
        return True

    def _place(self, sequence: Sequence, reserved: int, held_back: dict[Sequence, int], *, admits: bool = True) -> bool:
        """Give a waiting sequence a slot and its reusable pages, if the rest of its pages are available and those
        ``reserved`` for running sequences and those of sequences held back or being read remain. Where more of its
        prefix is worth reading, that begins instead; it is all that is done unless it ``admits``."""
        holdings, fetches = self._holdings, self._fetches
        others = [*held_back, *fetches.others(sequence)]
        if len(holdings.slots.free_slots) <= len(others):
            return False
        needed_state = holdings.state_pages.needed
        if needed_state(sequence) + sum(map(needed_state, others)) > len(holdings.state_pages.free_pages):
            return False
        reused = self._reusable_pages(sequence)
        for page in reused:
            holdings.pool.share(page)
        fetches.drop(sequence, is_used=True)
        needed = holdings.needed_pages(sequence, reused)
        reserved += sum(held_back.values()) + fetches.num_reserved(sequence)
        upper_pages = holdings.upper_pages.share(reused)
        has_upper = holdings.upper_pages.has_room(sequence, reused, holdings.running, held_back)
        if needed + reserved > holdings.pool.num_available or not has_upper:
            holdings.let_go(reused)
            holdings.upper_pages.let_go(upper_pages)
            return False
        if fetches.begin(sequence, reused, needed):
            return True
        if not admits:
            holdings.let_go(reused)
            return False
        fetches.note_use(sequence, len(reused))
        holdings.run(sequence, reused, upper_pages)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.metrics.num_reused_pages += len(reused)
        self.num_reused_tokens += sequence.num_computed
        return True

    def _reusable_pages(self, sequence: Sequence) -> list[int]:
        """Written pages that hold the K,V of this sequence's first tokens, from the cache or a sibling."""
        page_size, rows = self._holdings.config.page_size, self._holdings.state_rows
        best = self._holdings.prefix_cache.lookup(sequence) if self._use_cache else []
        best = best[: rows.reach(best)]
        for other in sequence.siblings if sequence.predicted is None else ():
            is_whole = other.cache_offset == 0 and not (self._measures and other.is_changed)
            if other is not sequence and other.status is Status.RUNNING and is_whole:
                shared = min(other.num_computed, sequence.num_prompt_tokens, sequence.num_reusable)
                num_pages = rows.reach(other.pages[: shared // page_size])
                if num_pages > len(best):
                    best = other.pages[:num_pages]
        return best
