"""Probes of caches that are about to be changed: numbers, never tensors."""

from kvforge.kv_policies.capabilities import Probing
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.schedule import Schedule


class Probes:
    """Which probe of its prompt each running sequence has reached. Until all are computed, its first transition waits.
    A step computes one, of the first who waits."""

    def __init__(self, probing: Probing) -> None:
        self._probing = probing
        self._num_done: dict[Sequence, int] = {}

    def awaits(self, plan: Schedule, sequence: Sequence) -> bool:
        """Whether a sequence that is due waits for probes; one of them may then be in the plan."""
        num_done = self._num_done.get(sequence, 0)
        if num_done == self._probing.num_probes(sequence.num_prompt_tokens):
            return False
        if sequence.num_computed != sequence.first_transition:
            return False
        if not plan.probes:
            plan.probes[sequence] = num_done
        return True

    def commit(self, plan: Schedule) -> None:
        """Record that a step has computed its probe."""
        for sequence, index in plan.probes.items():
            self._num_done[sequence] = index + 1

    def give_back(self, sequence: Sequence) -> None:
        """Forget what was computed of a sequence."""
        self._num_done.pop(sequence, None)
