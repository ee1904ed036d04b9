"""The engine's side of drafting: whom to draft for before a step is planned, and what its plan made of it."""

import logging

from kvforge.engine import Manifest
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.schedule import Schedule
from kvforge.runtime.scheduler import Scheduler
from kvforge.runtime.sequence import Sequence, Status
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from kvforge.runtime.speculation.drafter import Draft, Drafter, make_drafter

logger = logging.getLogger(__name__)


class Drafting:
    """Has drafts proposed to the scheduler before every step. Drafts that a request brought itself come first.

    A drafter that fails is logged once and its sequences are decoded plainly in that step.
    """

    def __init__(self, config: SpeculativeConfig, manifest: Manifest, runtime: RuntimeConfig) -> None:
        self.drafter: Drafter | None = make_drafter(config, manifest, runtime)
        self._vocab_size = runtime.vocab_size
        self._lengths = DraftLength(config.num_speculative_tokens)
        self._drafts: dict[Sequence, Draft] = {}
        self._ran: list[Sequence] = []
        self._has_failed = False

    def propose(self, scheduler: Scheduler) -> None:
        """Propose drafts, or ask for room for them, for sequences that only have their last token to compute."""
        self._ran = list(scheduler.running)
        decoding = [s for s in self._ran if s.length - s.num_computed == 1 and s not in scheduler.proposals]
        counts = self._lengths.counts(decoding)
        wanted = [(sequence, count) for sequence, count in zip(decoding, counts, strict=True) if count > 0]
        if self.drafter is None:
            scheduler.rooms = dict(wanted)
        elif wanted:
            self._drafts = self._ask(self.drafter, wanted)
            for sequence, draft in self._drafts.items():
                scheduler.propose(sequence, draft.token_ids)

    def planned(self, plan: Schedule, scheduler: Scheduler) -> None:
        """Note which drafts are in the step's plan; the others are dropped, and so is what is kept of victims."""
        for sequence, draft in self._drafts.items():
            scheduler.proposals.pop(sequence, None)
            if draft.probs is not None and sequence in plan.drafts:
                plan.draft_probs[sequence] = draft.probs[: len(plan.drafts[sequence])]
        self._drafts = {}
        for sequence in self._ran:
            if sequence.status is not Status.RUNNING:
                self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept of a sequence that was finished, preempted or given up; idempotent."""
        self._lengths.forget(sequence)
        if self.drafter is not None:
            try:
                self.drafter.forget(sequence)
            except Exception:
                self._log_failure()

    def _ask(self, drafter: Drafter, wanted: list[tuple[Sequence, int]]) -> dict[Sequence, Draft]:
        try:
            drafts = drafter.draft([sequence for sequence, _ in wanted], [count for _, count in wanted])
            return {
                sequence: draft
                for (sequence, count), draft in zip(wanted, drafts, strict=True)
                if 0 < len(draft.token_ids) <= count and all(0 <= t < self._vocab_size for t in draft.token_ids)
            }
        except Exception:
            self._log_failure()
            return {}

    def _log_failure(self) -> None:
        if not self._has_failed:
            logger.exception("a drafter failed; its sequences are decoded plainly")
        self._has_failed = True
