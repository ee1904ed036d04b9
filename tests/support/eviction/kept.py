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
        self._pools = [pool[len(pool) - len(self._policy.keeping.named_pools)] for pool in engine.runner.pools]
        self._sets: dict[tuple[str, int], Kept] = {}
        apply = self._state.apply

        def listen(transitions: Sequence[Transition]) -> None:
            apply(transitions)
            for transition in transitions:
                self._note(transition.sequence)

        self._state.apply = listen

    def _note(self, sequence: Any) -> None:
        kept = [
            [self._positions(sequence, owner, head) for head in range(pool.shape[2])]
            for owner, pool in enumerate(self._pools)
        ]
        sets = self._sets.setdefault((sequence.request_id, sequence.index), {})
        assert sets.setdefault(sequence.num_computed, kept) == kept, "another set after a preemption"

    def _positions(self, sequence: Any, owner: int, head: int) -> list[int]:
        """The positions that a head keeps, ascending."""
        size, num_heads = self._page_size, self._pools[owner].shape[2]
        keep = self._policy.num_cached(sequence.num_prompt_tokens, sequence.num_computed)
        columns = [(owner, page, head) for page in range(-(-keep // size))]
        if self._policy.insertion.views_pools:
            lane_pages, lane_table = self._state._states[owner][-2:]
            mine = lane_table[sequence.slot, head, : lane_pages[sequence.slot, head]].tolist()
            numbers = [(self._state._first_page(one), one) for one in range(len(self._pools))]
            columns = []
            for number in mine:
                page, column = divmod(number, size * num_heads)
                first, whose = max(one for one in numbers if one[0] <= page)
                whose = whose if self._policy.insertion.owners_share else owner
                columns.append((whose, sequence.pages.index(page - first), column))
            keep = len(columns) * size
        places = [
            (whose, sequence.state_pages[page], row, column) for whose, page, column in columns for row in range(size)
        ]
        found = [int(self._pools[whose][page, row, column]) for whose, page, row, column in places[:keep]]
        behind = sequence.num_prompt_tokens % size if self._policy.keeping.keeps_by_content else 0
        return sorted([*found, *range(sequence.num_computed - behind, sequence.num_computed)])

    def of(self, request_id: str, index: int) -> Kept:
        """The sets of one sequence."""
        return self._sets.get((request_id, index), {})

    def all(self) -> dict[tuple[str, int], Kept]:
        """The sets of all sequences."""
        return self._sets
