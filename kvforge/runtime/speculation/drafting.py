"""The engine's side of drafting: whom to draft for before a step is planned, and what its plan made of it."""

import logging
import time
from collections.abc import Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from kvforge.manifest import Manifest
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from kvforge.runtime.speculation.drafter import FREE, Draft, Drafter, Reporting, Watchable, make_drafter
from kvforge.runtime.step.work import WorkListener

logger = logging.getLogger(__name__)

IDLE, MAX_REST = 4, 7
"""After every ``IDLE`` steps in a row without drafts nothing is tried for a step more, up to these."""
MAX_CLOSED = 31
"""While drafting does not pay, so many steps are not even observed behind each that is."""


class NoDrafting:
    """Nothing is drafted; requests may bring drafts all the same."""

    is_on: ClassVar[bool] = False
    drafter: Drafter | None = None
    probs: Mapping[Sequence, torch.Tensor] = MappingProxyType({})

    def propose(self, scheduler: Scheduler) -> None:
        """Nothing."""

    def planned(self, plan: Schedule, scheduler: Scheduler) -> None:
        """Nothing."""

    def observe(self, plan: Schedule, outputs: dict[Sequence, SequenceOutput]) -> None:
        """Nothing."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing."""

    def stats(self) -> dict[str, Any]:
        return {}

    def watch(self, listener: WorkListener) -> None:
        """Nothing."""


class Drafting(NoDrafting):
    """Has drafts proposed to the scheduler before every step. Drafts that a request brought itself come first.

    A drafter that fails is logged once and its sequences are decoded plainly in that step.
    """

    is_on: ClassVar[bool] = True

    def __init__(self, config: SpeculativeConfig, manifest: Manifest, runtime: RuntimeConfig) -> None:
        self.drafter = make_drafter(config, manifest, runtime)
        self._is_free = config.method in FREE
        self._vocab_size = runtime.vocab_size
        self._lengths = DraftLength(config.num_speculative_tokens)
        self._drafts: dict[Sequence, Draft] = {}
        self.probs: dict[Sequence, torch.Tensor] = {}
        """What the drafts of the step's plan were drawn from, [number of drafts, vocab_size] float32."""
        self._ran: list[Sequence] = []
        self._was_tried = self._is_plain = self._follows_plain = False
        self._began = self._looking = 0.0
        self._num_asked = 0
        self._num_preemptions = 0
        self._num_idle = self._rest = self._num_rests = 0
        self._is_closed = self._is_resting = False
        self._has_failed = False

    def propose(self, scheduler: Scheduler) -> None:
        """Propose drafts, or ask for room for them, for sequences that only have their last token to compute."""
        self._num_preemptions = scheduler.num_preemptions
        self._began, self._follows_plain, self._was_tried = time.perf_counter(), self._is_plain, False
        if self._rest > 0 and self._ran == scheduler.running:
            self._rest -= 1
            self._is_resting = self._is_closed
            return
        self._ran, self._is_closed, self._is_resting = scheduler.running.copy(), False, False
        decoding = [s for s in self._ran if s.length - s.num_computed == 1]
        if not decoding:
            return
        if not self._lengths.is_due(len(decoding)):
            self._rest, self._is_closed = min(self._lengths.num_rests(len(decoding)), MAX_CLOSED), True
            return
        self._was_tried, self._num_asked = True, len(decoding)
        room = {s: self._lengths.room(s) for s in decoding if s not in scheduler.drafts.proposals}
        wanted = {sequence: count for sequence, count in room.items() if count > 0}
        drafter = self.drafter
        if drafter is not None and self._is_free:
            drafts = self._ask(drafter, wanted)
            available = {sequence: len(draft.token_ids) for sequence, draft in drafts.items()}
            chances = {s: draft.chances for s, draft in drafts.items() if draft.chances is not None}
            lengths = self._lengths.choose(len(decoding), available, chances)
            self._drafts = {sequence: drafts[sequence].first(count) for sequence, count in lengths.items()}
        else:
            wanted = self._lengths.choose(len(decoding), wanted)
            if drafter is None:
                scheduler.drafts.limits = wanted
            else:
                self._drafts = self._ask(drafter, wanted)
        for sequence, draft in self._drafts.items():
            scheduler.propose(sequence, draft.token_ids)
        if self._drafts or scheduler.drafts.limits:
            self._num_idle = self._rest = 0
        else:
            self._num_idle += 1
            self._rest = min(self._num_idle // IDLE, MAX_REST)
        self._looking = time.perf_counter() - self._began

    def planned(self, plan: Schedule, scheduler: Scheduler) -> None:
        """Note which drafts are in the step's plan; the others are dropped, and so is what is kept of victims. Where
        none were looked for, nothing is noted to draft from: so plain steps are measured without."""
        plan.notes_decodes, plan.notes_prompts = self._was_tried, self._lengths.pays_for_prompts
        self.probs.clear()
        if self._drafts:
            for sequence, draft in self._drafts.items():
                scheduler.drafts.proposals.pop(sequence, None)
                if draft.probs is not None and sequence in plan.drafts:
                    self.probs[sequence] = draft.probs[: len(plan.drafts[sequence])]
            self._drafts = {}
        if scheduler.num_preemptions != self._num_preemptions:
            for sequence in self._ran:
                if sequence.status is not Status.RUNNING:
                    self.forget(sequence)

    def observe(self, plan: Schedule, outputs: dict[Sequence, SequenceOutput]) -> None:
        """Learn from a step that has given tokens how long drafts should be."""
        if self._is_resting and not (plan.drafts or plan.note_seconds):
            self._num_rests += 1
            return
        seconds = time.perf_counter() - self._began
        results: dict[Sequence, tuple[int, int]] = {}
        for sequence, drafts in plan.drafts.items():
            pairs = zip(drafts, outputs[sequence].new_token_ids, strict=False)
            results[sequence] = len(drafts), len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        for sequence, room in plan.draft_limits.items():
            count, num_right = results.get(sequence, (0, 0))
            if count < room:  # what it was not sure enough of to draft counts as wrong
                results[sequence] = count + 1, num_right
        num_sequences = len(plan.decodes) + len(plan.prefills)
        no_prompts = num_sequences + plan.num_drafts == plan.num_tokens
        if not no_prompts:
            self._lengths.add_prompts(plan.note_seconds)
            if self._was_tried:
                drafted, right = (sum(counts) for counts in zip((0, 0), *results.values(), strict=True))
                self._lengths.add_beside_prompts(self._num_asked, drafted, right, self._looking)
        self._is_plain = no_prompts and not (self._was_tried or results)
        says_time = self._follows_plain if self._is_plain else no_prompts
        looking, took = self._looking if self._was_tried else 0.0, seconds if says_time else None
        self._lengths.observe(num_sequences, results, self._was_tried, took, self._num_rests, looking)
        if self._is_plain and says_time:
            self._num_rests = 0
        for sequence in results:
            if sequence.status is Status.FINISHED:
                self._lengths.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept of a sequence that was finished, preempted or given up; idempotent."""
        self._lengths.forget(sequence)
        if self.drafter is not None:
            try:
                self.drafter.forget(sequence)
            except Exception:
                self._log_failure()

    def stats(self) -> dict[str, Any]:
        """Return what the drafter has to say of itself, by name."""
        return self.drafter.stats() if isinstance(self.drafter, Reporting) else {}

    def watch(self, listener: WorkListener) -> None:
        """Tell ``listener`` of the drafter's steps before they begin, where it has any."""
        if isinstance(self.drafter, Watchable):
            self.drafter.watch(listener)

    def _ask(self, drafter: Drafter, wanted: dict[Sequence, int]) -> dict[Sequence, Draft]:
        """Drafts as far as they can be computed: tokens of the model, no more than were asked for."""
        if not wanted:
            return {}
        try:
            drafts = drafter.draft(list(wanted), list(wanted.values()))
            return {
                sequence: draft.first(count)
                for (sequence, count), draft in zip(wanted.items(), drafts, strict=True)
                if draft.token_ids and self._can_be_computed(draft)
            }
        except Exception:
            self._log_failure()
            return {}

    def _can_be_computed(self, draft: Draft) -> bool:
        probs, shape = draft.probs, (len(draft.token_ids), self._vocab_size)
        is_drawn = probs is None or (
            probs.shape == shape and probs.dtype is torch.float32 and probs.device.type == "cpu"
        )
        if draft.chances is not None and len(draft.chances) != len(draft.token_ids):
            return False
        return is_drawn and min(draft.token_ids) >= 0 and max(draft.token_ids) < self._vocab_size

    def _log_failure(self) -> None:
        if not self._has_failed:
            logger.exception("a drafter failed; its sequences are decoded plainly")
        self._has_failed = True
