"""What an engine with an eviction policy keeps, read from its pools after every eviction."""

from collections.abc import Sequence
from typing import Any

from kvforge.kv_policies.transition import Transition
from kvforge.runtime import LLMEngine

Kept = dict[int, list[list[list[int]]]]
"""By the number of computed tokens, for each owner and KV head the positions that are left, ascending."""


class KeptSets:
    """Listens to an engine's evictions. What is evicted again after a preemption must be the same."""

    def __init__(self, engine: LLMEngine) -> None:
        self._state: Any = engine.runner._state
        self._policy = engine.scheduler.policy
        self._page_size = engine.config.page_size
        self._pools = [pool[len(pool) - len(self._policy.state_pools(1, 1, 1))] for pool in engine.runner.pools]
        self._sets: dict[tuple[str, int], Kept] = {}
        apply = self._state.apply

        def listen(transitions: Sequence[Transition]) -> None:
            apply(transitions)
            for transition in transitions:
                self._note(transition.sequence)

        self._state.apply = listen

    def _note(self, sequence: Any) -> None:
        keep = self._policy.num_cached(sequence.num_prompt_tokens, sequence.num_computed)
        places = [(sequence.state_pages[i // self._page_size], i % self._page_size) for i in range(keep)]
        kept = [
            [sorted(int(pool[page, row, head]) for page, row in places) for head in range(pool.shape[2])]
            for pool in self._pools
        ]
        sets = self._sets.setdefault((sequence.request_id, sequence.index), {})
        assert sets.setdefault(sequence.num_computed, kept) == kept, "another set after a preemption"

    def of(self, request_id: str, index: int) -> Kept:
        """The sets of one sequence."""
        return self._sets.get((request_id, index), {})

    def all(self) -> dict[tuple[str, int], Kept]:
        """The sets of all sequences."""
        return self._sets
