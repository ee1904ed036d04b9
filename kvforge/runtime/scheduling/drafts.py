"""Drafts of a step's survivors, as far as tokens and pages are left: numbers, never tensors."""

from kvforge.runtime.requests.sequence import NEVER, Sequence
from kvforge.runtime.scheduling.holdings import Holdings
from kvforge.runtime.scheduling.schedule import Schedule


class Drafts:
    """``proposals`` are drafts of the next tokens of sequences. When a sequence's last token is computed, the first of
    them are computed with it as far as tokens, survivors and pages of the step are left by everything else; they
    cost no other sequence anything. Proposals are for one step: what does not fit is dropped. ``limits`` are numbers of
    drafts that the next step may make of sequences without proposals; they are planned alike.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.proposals: dict[Sequence, tuple[int, ...]] = {}
        self.limits: dict[Sequence, int] = {}

    def propose(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Have ``drafts`` verified as the sequence's next tokens in the step that computes its last one. A sequence
        whose cache changes at some position has none."""
        if drafts and sequence.first_transition == NEVER:
            self.proposals[sequence] = drafts

    def plan(self, plan: Schedule) -> None:
        """Add the proposals of the plan's survivors, or room for drafts, as many as fit."""
        if not (self.proposals or self.limits):
            return
        holdings, survivors = self._holdings, plan.survivors
        room = holdings.config.max_num_survivors - len(survivors)
        decodes = set(plan.decodes)
        for sequence in survivors:
            drafts = self.proposals.pop(sequence, ())
            wanted = len(drafts) or self.limits.get(sequence, 0)
            # One token more than drafts comes out of the step.
            count = min(wanted, plan.budget, room, sequence.max_length - sequence.length - 1)
            if holdings.state_rows.is_used:
                count = min(count, len(holdings.state_rows.free_rows))
            while count > 0 and not holdings.extend(sequence, sequence.length + count):
                count = min(count, holdings.covered(sequence) - sequence.length)
            if count > 0:
                holdings.state_rows.take_drafts(sequence, count)
                if drafts:
                    plan.drafts[sequence] = drafts[:count]
                else:
                    plan.draft_limits[sequence] = count
                plan.budget -= count
                room -= count
        self.limits = {}
        if moved := decodes & plan.drafts.keys():
            plan.prefills += [(sequence, 1) for sequence in plan.decodes if sequence in moved]
            plan.decodes = [sequence for sequence in plan.decodes if sequence not in moved]
