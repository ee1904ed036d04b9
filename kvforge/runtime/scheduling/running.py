"""What running sequences compute in a step: the next token of each, then chunks of prompts."""

from kvforge.runtime.requests.sequence import Sequence, Status
from kvforge.runtime.scheduling.holdings import Holdings
from kvforge.runtime.scheduling.predictions import Predictions
from kvforge.runtime.scheduling.schedule import Schedule


class RunningWork:
    """Decode tokens of running sequences come first, then chunks of running prompts (Split-Fuse)."""

    def __init__(self, holdings: Holdings, predictions: Predictions | None) -> None:
        self._holdings, self._predictions = holdings, predictions
        self._is_probed = holdings.policy.probing is not None

    def plan(self, plan: Schedule) -> None:
        """Plan all that fits, in order."""
        running, covered, is_probed = self._holdings.running, self._holdings.covered, self._is_probed
        prompts: list[Sequence] = []
        for sequence in list(running):
            if is_probed and sequence.is_due:
                continue  # it waits for probes
            if sequence.length - sequence.num_computed != 1:
                prompts.append(sequence)
            elif plan.budget == 0:
                break
            elif sequence.status is not Status.RUNNING:
                continue  # preempted just now
            elif covered(sequence) >= sequence.length + sequence.cache_offset:
                plan.decodes.append(sequence)
                plan.budget -= 1
            else:
                self._plan_tokens(plan, sequence, 1)
        for sequence in prompts:
            if plan.budget == 0:
                break
            if sequence.status is Status.RUNNING and sequence.num_computed < sequence.length:
                self.plan_chunk(plan, sequence)

    def plan_chunk(self, plan: Schedule, sequence: Sequence) -> int:
        """Plan as much of a running sequence's prompt as fits; returns how many tokens the model would compute."""
        if self._predictions is not None and sequence.is_predicting:
            self._predictions.plan_chunk(plan, sequence)
            return 0
        count = min(self._max_chunk(sequence), plan.budget)
        self._plan_tokens(plan, sequence, count)
        return count

    def _plan_tokens(self, plan: Schedule, sequence: Sequence, num_tokens: int) -> None:
        holdings = self._holdings
        end = sequence.num_computed + num_tokens
        cached = end + sequence.cache_offset
        if holdings.covered(sequence) < cached and not holdings.grow(plan, sequence, cached):
            return
        plan.budget -= num_tokens
        if num_tokens == 1 and end == sequence.length:
            plan.decodes.append(sequence)
        else:
            plan.prefills.append((sequence, num_tokens))

    def _max_chunk(self, sequence: Sequence) -> int:
        """Tokens that one step may compute: all that are left, unless the policy wants smaller pieces."""
        count = min(sequence.end_of_piece, sequence.next_transition) - sequence.num_computed
        piece = self._holdings.policy.max_piece(sequence.num_prompt_tokens, sequence.num_computed)
        return count if piece is None else min(count, piece)
