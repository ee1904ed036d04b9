"""A step that the device still computes while the next one is planned (asynchronous scheduling)."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.sampling.on_device import can_queue, choose, draws_of
from kvforge.runtime.sampling.sampler import NOT_FINITE, SampledTokens
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.scheduler import Scheduler
from kvforge.runtime.sessions.session import PendingTokens, Session


@dataclass
class Flight:
    """A launched step: its plan, its survivors and the tokens that the device chooses for them.

    Before the next step is planned it is *assumed*: committed, and each survivor goes on by a token that is not known
    yet. The device has that token when the next step reads it. When the step has *landed*, the survivors are as they
    were before that, for the engine to give them their tokens. Sequences may end at any time between.
    """

    plan: Schedule
    survivors: list[Sequence]
    tokens: PendingTokens
    is_assumed: bool = False

    def assume(self, scheduler: Scheduler) -> None:
        """Have the scheduler plan what follows. Idempotent."""
        if self.is_assumed:
            return
        self.is_assumed = True
        drop_finished(self.plan)
        scheduler.commit(self.plan)
        scheduler.expect([one for one in self.survivors if one.status is Status.RUNNING])

    def rows_of(self, plan: Schedule) -> torch.Tensor:
        """Return of each decode token of the next step the row of ``tokens`` that it is, -1 where it is known: int32
        [D]."""
        rows = {sequence: row for row, sequence in enumerate(self.survivors)}
        found = (rows.get(sequence, -1) for sequence in plan.decodes)
        return torch.from_numpy(np.fromiter(found, dtype=np.int32, count=len(plan.decodes)))

    def land(self, scheduler: Scheduler) -> tuple[list[Sequence], SampledTokens]:
        """Wait for the tokens; returns the survivors that have not ended meanwhile, and theirs."""
        ids = self.tokens.collect().tolist()
        scheduler.withdraw()
        rows = [row for row, one in enumerate(self.survivors) if one.status is not Status.FINISHED]
        errors = {place: NOT_FINITE for place, row in enumerate(rows) if ids[row] < 0}
        for row in rows:
            if self.survivors[row].sampling is not None:
                self.survivors[row].sampling.record(ids[row])
        return [self.survivors[row] for row in rows], SampledTokens([ids[row] for row in rows], {}, errors)


def leave(
    plan: Schedule, logits: torch.Tensor | None, launched: list[Sequence], session: Session, vocab_size: int
) -> tuple[torch.Tensor | None, Flight | None]:
    """Leave a launched step to the device if that chooses all its tokens: it is the one in flight. Otherwise return
    its logits on the CPU, without rows of what has ended since it was launched."""
    drop_finished(plan)
    survivors = plan.survivors
    if logits is None or not survivors:
        return None, None
    if not plan.drafts and can_queue(survivors):
        draws = draws_of(launched, vocab_size, session.upload)
        return None, Flight(plan, launched, session.launch(partial(choose, logits, draws), len(launched)))
    logits = session.host_logits(logits)
    if len(survivors) == len(launched):
        return logits, None
    counts = [1 + len(plan.drafts.get(sequence, ())) for sequence in launched]
    kept = [sequence.status is not Status.FINISHED for sequence in launched]
    return logits[np.repeat(kept, counts)], None


def note_scores(survivors: list[Sequence], sampled: SampledTokens) -> None:
    """End those of whose prompts a log-probability cannot be told."""
    for row, sequence in enumerate(survivors):
        if sequence.prompt_scores is not None and not sequence.prompt_scores.is_finite:
            sampled.errors.setdefault(row, NOT_FINITE)


def drop_finished(plan: Schedule) -> None:
    """Take sequences that have ended since it was planned out of a plan."""
    plan.decodes = [sequence for sequence in plan.decodes if sequence.status is not Status.FINISHED]
    plan.prefills = [entry for entry in plan.prefills if entry[0].status is not Status.FINISHED]
