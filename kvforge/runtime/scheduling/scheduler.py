"""Which tokens of which sequences the next step computes, and in which pages: numbers, never tensors."""

from bisect import bisect_left, insort
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

import numpy as np

from kvforge.kv_policies.transition import Transition
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import NEVER, Sequence, Status
from kvforge.runtime.scheduling.exact_pages import ExactPages
from kvforge.runtime.scheduling.fetches import Fetches, PageSource
from kvforge.runtime.scheduling.page_pool import PagePool
from kvforge.runtime.scheduling.planned_prefixes import PlannedPrefixes
from kvforge.runtime.scheduling.prefix_cache import PrefixCache
from kvforge.runtime.scheduling.retention import set_priorities
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.runtime.scheduling.state_pages import StatePages

_by_order = attrgetter("order")


class Scheduler:
    """Continuous batching with chunked prefill (Split-Fuse) over a paged K,V pool.

    A step takes the decode tokens of running sequences first, then chunks of running prompts, then admits
    waiting sequences, all within ``max_num_tokens``. Order is (priority, arrival, index) throughout. When a
    running sequence needs a page and none is left, the last running sequence in that order loses its pages
    and is computed again later (its tokens stay). The first one in order is never the victim of another, and
    every sequence alone fits the pool, so there is always progress.

    A prompt whose beginning another one computes in the step being planned waits for those pages where that saves it
    work (see ``PlannedPrefixes``). Others may pass it, but not take the slot and the pages that it needs.

    A prompt whose beginning a ``source`` keeps is not admitted before it is read (see ``Fetches``). Others are, on the
    same terms.

    A KV policy may change a sequence's cache between two steps, at positions of its own (``next_transition``): the
    sequence gives up pages for those of its changed cache, of which there are fewer. What such a sequence loses
    when it is preempted is computed again in the same pieces.

    ``proposals`` are drafts of the next tokens of sequences. When a sequence's last token is computed, the first of
    them are computed with it as far as tokens, survivors and pages of the step are left by everything else; they
    cost no other sequence anything. Proposals are for one step: what does not fit is dropped. ``draft_limits`` are
    numbers of drafts that the next step may make of sequences without proposals; they are planned alike.

    Where prompts are predicted, an auxiliary model runs over all of a prompt in chunks, and then the model itself over
    the ``exact_intervals`` from left to right, over what is predicted around them.
    """

    def __init__(self, config: RuntimeConfig, source: PageSource | None = None) -> None:
        self.config = config
        self.prefix_cache = PrefixCache(config.page_size, root=str(config.kv_policy))
        self.pool = PagePool(config.num_pages, evict=self.prefix_cache.forget)
        self.fetches = Fetches(self.pool, self.prefix_cache, source)
        self.policy = config.kv_policy
        columns, seals = self.policy.slot_columns, self.policy.seals_pages
        max_pages = config.max_pages_per_seq, config.max_state_pages_per_seq
        self.slots = SlotTable(config.max_num_seqs, *max_pages, columns, seals)
        self.state_pages = StatePages(config, self.slots)
        self.exact_pages = ExactPages(config, self.slots)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.proposals: dict[Sequence, tuple[int, ...]] = {}
        self.draft_limits: dict[Sequence, int] = {}
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self.num_transitions = 0
        """Changes of a sequence's cache so far; again after a preemption counted again."""
        self.num_waits = 0
        """Times an admission was put off for pages that a step was about to write."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.status = Status.WAITING
        if self.policy.has_transitions:
            first = self.policy.next_transition(sequence.num_prompt_tokens, 0)
            sequence.first_transition = sequence.next_transition = NEVER if first is None else first
            reusable = self.policy.max_reusable(sequence.num_prompt_tokens)
            sequence.max_reusable = NEVER if reusable is None else reusable
        if self.config.exact_tokens is not None:
            sequence.num_to_predict = self.config.exact_tokens.num_to_predict(sequence.num_prompt_tokens)
        insort(self.waiting, sequence, key=_by_order)

    def propose(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Have ``drafts`` verified as the sequence's next tokens in the step that computes its last one.

        A sequence whose cache changes at some position has none.
        """
        if drafts and sequence.first_transition == NEVER:
            self.proposals[sequence] = drafts

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out in any state and let go of its pages and slot; idempotent."""
        if sequence.status is Status.RUNNING:
            self._remove(self.running, sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self._remove(self.waiting, sequence)
            self.fetches.drop(sequence)
        sequence.status = Status.FINISHED
        self.proposals.pop(sequence, None)

    def schedule(self) -> Schedule:
        """Plan one step; the plan is empty only if nothing can run before a sequence is added or finished."""
        plan = Schedule(self.config.max_num_tokens)
        page_size = self.config.page_size
        prompts: list[Sequence] = []
        self.fetches.advance()
        if self.policy.has_transitions:
            self._plan_transitions(plan)
        for sequence in list(self.running):
            if sequence.is_due:
                continue  # it waits for probes
            if sequence.length - sequence.num_computed != 1 or sequence.is_predicting:
                prompts.append(sequence)
            elif plan.budget == 0:
                break
            elif sequence.status is not Status.RUNNING:
                continue  # preempted just now
            elif len(sequence.pages) * page_size >= sequence.length + sequence.cache_offset:
                plan.decodes.append(sequence)
                plan.budget -= 1
            else:
                self._plan(plan, sequence, 1)
        for sequence in prompts:
            if plan.budget == 0:
                break
            if sequence.status is Status.RUNNING:
                self._plan_chunk(plan, sequence)
        if plan.num_preempted == 0 and self.waiting:
            if plan.budget > 0:
                self._plan_admissions(plan)
            elif self.fetches.source is not None:
                self._read_ahead()
        if self.proposals or self.draft_limits:
            self._plan_drafts(plan)
        return plan

    def commit(self, plan: Schedule) -> None:
        """Record that a step has written all planned K,V; publish the pages that are now full."""
        for sequence in plan.probes:
            sequence.num_probed += 1
        slots, page_size = self.slots, self.config.page_size
        publish = self.config.enable_prefix_cache
        if plan.decodes:
            slots.num_computed[[s.slot for s in plan.decodes]] += 1
        for sequence in plan.decodes:
            num_computed = sequence.num_computed = sequence.num_computed + 1
            sequence.prompt_done = True
            if publish and num_computed % page_size == 0 and sequence.cache_offset == 0:
                self.prefix_cache.publish(sequence)
        for sequence, num_tokens in plan.predictions:
            sequence.num_predicted += num_tokens
            if not sequence.is_predicting:
                self._set_intervals(sequence, plan.importance.get(sequence, ()))
        for sequence, num_tokens in plan.prefills:
            sequence.num_computed += num_tokens
            if len(sequence.exact_intervals) > 1 and sequence.num_computed == sequence.exact_intervals[0][1]:
                sequence.exact_intervals = sequence.exact_intervals[1:]
                sequence.num_computed = sequence.exact_intervals[0][0]
            sequence.prompt_done = sequence.prompt_done or sequence.num_computed >= sequence.num_prompt_tokens
            slots.num_computed[sequence.slot] = sequence.num_computed
            if publish and sequence.cache_offset == 0:
                self.prefix_cache.publish(sequence)
        if self.exact_pages.is_used:
            self._trim_exact_pages(plan)

    def _set_intervals(self, sequence: Sequence, importance: SequenceOf[float]) -> None:
        """Go on with what of a predicted prompt the model computes."""
        assert self.config.exact_tokens is not None
        sequence.exact_intervals = self.config.exact_tokens.intervals(sequence.num_prompt_tokens, importance)
        sequence.num_computed = sequence.exact_intervals[0][0]
        self.slots.num_computed[sequence.slot] = sequence.num_computed

    def _trim_exact_pages(self, plan: Schedule) -> None:
        """Take back the exact pages of full pages. Those under drafts stay until it is known which are accepted."""
        for sequence in plan.sequences:
            if not (sequence in plan.drafts or sequence in plan.draft_limits):
                self.exact_pages.trim(sequence)

    def accept(self, sequences: list[Sequence]) -> None:
        """Record that the newest token of each sequence was a draft, so that the step has written its K,V already."""
        for sequence in sequences:
            sequence.num_computed += 1
            self.slots.num_computed[sequence.slot] = sequence.num_computed
            if self.config.enable_prefix_cache and sequence.num_computed % self.config.page_size == 0:
                self.prefix_cache.publish(sequence)

    def roll_back(self, sequence: Sequence) -> None:
        """Let go of a running sequence's pages beyond its computed tokens: drafts that were not accepted."""
        keep = self.pages_for(sequence.num_computed + sequence.cache_offset)
        self._let_go(sequence.pages[keep:])
        del sequence.pages[keep:]
        self.exact_pages.trim(sequence)

    def append(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """Add each running sequence's new token."""
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
        self.slots.next_token[[s.slot for s in sequences]] = np.asarray(tokens, dtype=np.int32)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the K,V of ``num_tokens`` tokens."""
        return -(-num_tokens // self.config.page_size)

    def _plan_chunk(self, plan: Schedule, sequence: Sequence) -> int:
        """Plan as much of a running sequence's prompt as fits; returns how many tokens the model would compute."""
        if sequence.is_predicting:
            count = min(sequence.num_to_predict - sequence.num_predicted, plan.budget)
            end = sequence.num_predicted + count
            if len(sequence.pages) * self.config.page_size >= end or self._grow(plan, sequence, end):
                plan.budget -= count
                plan.predictions.append((sequence, count))
            return 0
        count = min(self._max_chunk(sequence), plan.budget)
        self._plan(plan, sequence, count)
        return count

    def _plan(self, plan: Schedule, sequence: Sequence, num_tokens: int) -> None:
        end = sequence.num_computed + num_tokens
        cached = end + sequence.cache_offset
        if len(sequence.pages) * self.config.page_size < cached and not self._grow(plan, sequence, cached):
            return
        plan.budget -= num_tokens
        if num_tokens == 1 and end == sequence.length:
            plan.decodes.append(sequence)
        else:
            plan.prefills.append((sequence, num_tokens))

    def _plan_admissions(self, plan: Schedule) -> None:
        """Admit waiting sequences and add their first chunks.

        Nothing overtakes the first one, except that sequences waiting for their leader's prompt, for pages that are
        being read or for pages of this step are passed over.
        """
        prefixes, use_cache, index = PlannedPrefixes(self.prefix_cache, self.policy), self.config.enable_prefix_cache, 0
        if use_cache:
            prefixes.replace(plan.prefills)
        plan.num_reserved = sum(map(self._missing_pages, self.running))
        while plan.budget > 0 and index < len(self.waiting):
            sequence = self.waiting[index]
            if (
                sequence.waits_for_leader
                or self.fetches.awaits(sequence)
                or (len(prefixes.held_back) < len(self.slots.free_slots) and prefixes.hold_back(sequence, plan.budget))
            ):
                index += 1
            elif not self._admit(plan, sequence, prefixes):
                break
            elif sequence.status is Status.WAITING:
                index += 1
            else:
                count = self._plan_chunk(plan, sequence)
                plan.num_reserved += self._missing_pages(sequence)
                if use_cache:
                    prefixes.add(sequence, count)
        self.num_waits += len(prefixes.held_back)

    def _read_ahead(self) -> None:
        """Begin to read the prefix of the first waiting sequence that may have one, in a step without tokens for it."""
        reserved = sum(map(self._missing_pages, self.running))
        for sequence in self.waiting:
            if sequence.may_fetch and not sequence.waits_for_leader and sequence not in self.fetches.by_sequence:
                self._place(sequence, reserved, {}, admits=False)
                return

    def _plan_drafts(self, plan: Schedule) -> None:
        """Add the proposals of the plan's survivors, or room for drafts, as many as fit."""
        survivors = plan.survivors
        room = self.config.max_num_survivors - len(survivors)
        decodes = set(plan.decodes)
        for sequence in survivors:
            drafts = self.proposals.pop(sequence, ())
            wanted = len(drafts) or self.draft_limits.get(sequence, 0)
            # One token more than drafts comes out of the step.
            count = min(wanted, plan.budget, room, sequence.max_length - sequence.length - 1)
            while count > 0 and not self._extend(sequence, sequence.length + count):
                count = min(count, len(sequence.pages) * self.config.page_size - sequence.length)
            if count > 0:
                if drafts:
                    plan.drafts[sequence] = drafts[:count]
                else:
                    plan.draft_limits[sequence] = count
                plan.budget -= count
                room -= count
        self.draft_limits = {}
        if moved := decodes & plan.drafts.keys():
            plan.prefills += [(sequence, 1) for sequence in plan.decodes if sequence in moved]
            plan.decodes = [sequence for sequence in plan.decodes if sequence not in moved]

    def _max_chunk(self, sequence: Sequence) -> int:
        """Tokens that one step may compute: all that are left, unless the policy wants smaller pieces."""
        count = min(sequence.end_of_piece, sequence.next_transition) - sequence.num_computed
        piece = self.policy.max_piece(sequence.num_prompt_tokens, sequence.num_computed)
        return count if piece is None else min(count, piece)

    def _plan_transitions(self, plan: Schedule) -> None:
        """Change the cache of every sequence that is due. Where kept pages are rewritten, all copies are allocated
        before any page is given up: no transition of the step writes what another one reads."""
        due = [sequence for sequence in self.running if sequence.is_due and not self._is_probed(plan, sequence)]
        copies: dict[Sequence, dict[int, int]] = {}
        for sequence in due if self.policy.rewrites_pages else ():
            if sequence.status is Status.RUNNING:
                copies[sequence] = self._take_copies(plan, sequence)
        for sequence in due:
            if sequence.status is Status.RUNNING:
                self._change(plan, sequence, copies.get(sequence, {}))

    def _is_probed(self, plan: Schedule, sequence: Sequence) -> bool:
        """Whether a sequence that is due waits for probes of its cache; a step has one, of the first who waits."""
        if sequence.num_probed == self.policy.num_probes(sequence.num_prompt_tokens):
            return False
        if sequence.num_computed != sequence.first_transition:
            return False
        if not plan.probes:
            plan.probes[sequence] = sequence.num_probed
        return True

    def _take_copies(self, plan: Schedule, sequence: Sequence) -> dict[int, int]:
        """Return new pages by the indices of those pages that a transition would rewrite though others hold them or may
        take them over; the sequence holds them behind its own until then. Published pages for whose copies there is no
        room are unpublished instead. Empty if the sequence was preempted itself."""
        kept = self._kept_pages(sequence)
        copies: dict[int, int] = {}
        for index in kept:
            page = sequence.pages[index]
            is_shared = self.pool.ref_counts[page] > 1
            if not (is_shared or self.prefix_cache.holds(page)):
                continue
            copy = self.pool.allocate()
            while copy is None and is_shared:
                if not self.fetches.give_up():
                    victim = self.running[-1]
                    self._preempt(plan, victim)
                    plan.num_preempted += 1
                    if victim is sequence:
                        return {}
                is_shared = self.pool.ref_counts[page] > 1
                copy = self.pool.allocate()
            if copy is None:
                self.prefix_cache.forget(page)
            else:
                copies[index] = copy
                sequence.pages.append(copy)
        return copies

    def _kept_pages(self, sequence: Sequence) -> SequenceOf[int]:
        return self.policy.kept_pages(sequence.num_prompt_tokens, sequence.num_computed, self.config.page_size)

    def _change(self, plan: Schedule, sequence: Sequence, copies: dict[int, int]) -> None:
        """Exchange a sequence's pages for those of its cache after a transition, and have this done. ``copies`` are at
        the end of its pages, to take the places of those that they are copies of."""
        policy, num_prompt, num_computed = self.policy, sequence.num_prompt_tokens, sequence.num_computed
        if sequence.cache_offset == 0:
            self._set_priorities(sequence)
        old_pages = sequence.pages[: len(sequence.pages) - len(copies)]
        kept = [index for index in self._kept_pages(sequence) if index < len(old_pages)]
        given_up = set(range(len(old_pages))).difference(kept).union(copies)
        self._let_go([old_pages[index] for index in sorted(given_up)])
        sequence.pages = [copies.get(index, old_pages[index]) for index in kept]
        self.slots.page_table[sequence.slot, : len(sequence.pages)] = sequence.pages
        sequence.cache_offset = policy.num_cached(num_prompt, num_computed) - num_computed
        self.slots.cache_offset[sequence.slot] = sequence.cache_offset
        self._set_columns(sequence)
        following = policy.next_transition(num_prompt, num_computed + 1)
        sequence.next_transition = NEVER if following is None else following
        self.num_transitions += 1
        if self._grow(plan, sequence, num_computed + sequence.cache_offset):
            plan.transitions[sequence] = Transition(sequence, tuple(old_pages))

    def _set_columns(self, sequence: Sequence) -> None:
        """Note the policy's numbers of a sequence that has just got its slot, or a changed cache."""
        policy = self.policy
        values = policy.slot_values(sequence.num_prompt_tokens, sequence.num_computed)
        for name, value in zip(policy.slot_columns, values, strict=True):
            self.slots.columns[name][sequence.slot] = value

    def _grow(self, plan: Schedule, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence pages for ``num_tokens`` cached tokens; False if it was preempted itself."""
        while not self._extend(sequence, num_tokens):
            if self.fetches.give_up():
                continue
            victim = self.running[-1]
            self._preempt(plan, victim)
            plan.num_preempted += 1
            if victim is sequence:
                return False
        return True

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
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
        return True

    def _preempt(self, plan: Schedule, victim: Sequence) -> None:
        plan.drop(victim)
        self._remove(self.running, victim)
        self._release(victim)
        victim.status = Status.WAITING
        victim.may_fetch = True
        insort(self.waiting, victim, key=_by_order)
        self.num_preemptions += 1
        victim.metrics.num_preemptions += 1

    def _admit(self, plan: Schedule, sequence: Sequence, prefixes: PlannedPrefixes) -> bool:
        """Move a waiting sequence to running if a slot and pages for all its tokens are there, or begin to read its
        prefix.

        Sequences of a strictly worse priority make room for it, and those behind it that are being read.
        """
        held_back = prefixes.held_back
        while not self._place(sequence, plan.num_reserved, held_back):
            if self.fetches.give_up(after=sequence.order):
                continue
            victim = self.running[-1] if self.running else None
            # Those who are held back wait for what running sequences compute: none of these may go now.
            if victim is None or held_back or victim.order[0] <= sequence.order[0]:
                return False
            plan.num_reserved -= self._missing_pages(victim)
            self._preempt(plan, victim)
            if self.config.enable_prefix_cache:
                prefixes.replace(plan.prefills)
        return True

    def _missing_pages(self, sequence: Sequence) -> int:
        """What a running sequence still needs for the tokens that it has, and a page to grow into."""
        return 1 + self._needed_pages(sequence, sequence.pages)

    def _needed_pages(self, sequence: Sequence, pages: list[int]) -> int:
        """Pages that a sequence with ``pages`` takes for all its tokens, less those that it gives up before."""
        length, change = sequence.length, sequence.next_transition
        if change > length:
            return self.pages_for(length + sequence.cache_offset) - len(pages)
        kept_by_others = sum(self.pool.ref_counts[page] > 1 for page in pages)
        before = self.pages_for(change + sequence.cache_offset) - len(pages)
        maximum = self.policy.max_cached(sequence.num_prompt_tokens, length, change)
        return max(before, self.pages_for(maximum) - (len(pages) - kept_by_others))

    def _place(self, sequence: Sequence, reserved: int, held_back: dict[Sequence, int], *, admits: bool = True) -> bool:
        """Give a waiting sequence a slot and its reusable pages, if the rest of its pages are available and those
        ``reserved`` for running sequences and those of sequences held back or being read remain. Where more of its
        prefix is worth reading, that begins instead; it is all that is done unless it ``admits``."""
        others = [*held_back, *self.fetches.others(sequence)]
        if len(self.slots.free_slots) <= len(others):
            return False
        state_pages = self.state_pages.needed(sequence) + sum(map(self.state_pages.needed, others))
        if state_pages > len(self.state_pages.free_pages):
            return False
        reused = self._reusable_pages(sequence)
        for page in reused:
            self.pool.share(page)
        self.fetches.drop(sequence, is_used=True)
        needed = self._needed_pages(sequence, reused)
        reserved += sum(held_back.values()) + self.fetches.num_reserved(sequence)
        if needed + reserved > self.pool.num_available:
            self._let_go(reused)
            return False
        if self.fetches.begin(sequence, reused, needed):
            return True
        if not admits:
            self._let_go(reused)
            return False
        self.fetches.note_use(sequence, len(reused))
        self._remove(self.waiting, sequence)
        insort(self.running, sequence, key=_by_order)
        sequence.status = Status.RUNNING
        sequence.slot = self.slots.free_slots.pop()
        sequence.pages = reused
        sequence.num_computed = len(reused) * self.config.page_size
        self.state_pages.take(sequence)
        self.slots.page_table[sequence.slot, : len(reused)] = reused
        self.slots.num_computed[sequence.slot] = sequence.num_computed
        self.slots.next_token[sequence.slot] = sequence.tokens[sequence.length - 1]
        if self.policy.slot_columns:
            self._set_columns(sequence)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.metrics.num_reused_pages += len(reused)
        self.num_reused_tokens += sequence.num_computed
        return True

    def _reusable_pages(self, sequence: Sequence) -> list[int]:
        """Written pages that hold the K,V of this sequence's first tokens, from the cache or a sibling."""
        best = self.prefix_cache.lookup(sequence) if self.config.enable_prefix_cache else []
        for other in sequence.siblings if not sequence.num_to_predict else ():
            if other is not sequence and other.status is Status.RUNNING and other.cache_offset == 0:
                shared = min(other.num_computed, sequence.num_prompt_tokens, sequence.num_reusable)
                if shared // self.config.page_size > len(best):
                    best = other.pages[: shared // self.config.page_size]
        return best

    def _release(self, sequence: Sequence) -> None:
        if sequence.cache_offset == 0:
            self._set_priorities(sequence)
        self._let_go(sequence.pages)
        sequence.pages = []
        self.state_pages.give_back(sequence)
        self.exact_pages.give_back(sequence)
        sequence.cache_offset = 0
        for column in (self.slots.cache_offset, *self.slots.columns.values()):
            column[sequence.slot] = 0
        sequence.next_transition = sequence.first_transition
        sequence.num_computed = sequence.num_published = sequence.num_probed = sequence.num_predicted = 0
        sequence.exact_intervals = ()
        self.slots.free_slots.append(sequence.slot)
        sequence.slot = -1

    def _set_priorities(self, sequence: Sequence) -> None:
        if sequence.params.retention and self.config.enable_prefix_cache:
            set_priorities(self.pool, self.prefix_cache, sequence)
            self.fetches.note_priorities(sequence)

    def _let_go(self, pages: list[int]) -> None:
        # Deepest first, so that the cache evicts the end of a prefix before its beginning.
        for page in reversed(pages):
            self.pool.release(page, keep=self.prefix_cache.holds(page))

    @staticmethod
    def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
        del ordered[bisect_left(ordered, sequence.order, key=_by_order)]
