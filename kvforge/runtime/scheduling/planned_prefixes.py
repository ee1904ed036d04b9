"""Prefixes in flight: pages that the step being planned will write, and who waits a step to take them over."""

from kvforge.kv_policies import KVPolicy
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.scheduling.prefix_cache import PrefixCache
from kvforge.runtime.scheduling.state_rows import StateRows


class PlannedPrefixes:
    """Full pages that a step's chunks will write, by the digest under which they are published after it.

    When prompts are admitted, every running prompt is planned to its end or the step is full. So what is in flight is
    in this plan, and waiting for it takes one step.
    """

    def __init__(self, cache: PrefixCache, policy: KVPolicy, state_rows: StateRows) -> None:
        self._cache, self._policy, self._state_rows = cache, policy, state_rows
        self._digests: set[bytes] = set()
        self._snapshots: set[bytes] = set()
        """Those of them behind which states of layers will be kept."""
        self.held_back: dict[Sequence, int] = {}
        """Sequences that are not admitted in this step, and the pages to keep for each of them: those of all its
        tokens and one to grow into."""

    def replace(self, chunks: list[tuple[Sequence, int]]) -> None:
        """The step computes these numbers of tokens of running sequences, and nothing of what was added before."""
        self._digests.clear()
        self._snapshots.clear()
        for sequence, num_tokens in chunks:
            self.add(sequence, num_tokens)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """The step computes the next ``num_tokens`` tokens of a running sequence."""
        page_size, start = self._cache.page_size, sequence.num_computed
        end = min(start + num_tokens, sequence.first_transition)  # what follows a transition is never published
        for index in range(start // page_size, end // page_size):
            self._digests.add(self._cache.digest(sequence, index))
            if self._state_rows.wants(sequence, index):
                self._snapshots.add(self._cache.digest(sequence, index))

    def hold_back(self, sequence: Sequence, budget: int) -> bool:
        """Whether a waiting sequence gains by waiting for this step's pages; it is in ``held_back`` then.

        It does if they save it at least as much as it could compute in this step, of which ``budget`` tokens are left,
        or as is left of it afterwards. Each wait of a sequence is for a longer prefix than its last one, so waits end
        even if the pages never come: their step fails, or they are evicted.
        """
        if not self._digests:
            return False
        cache, page_size = self._cache, self._cache.page_size
        num_pages, pages = sequence.num_reusable // page_size, cache.lookup(sequence)
        known, reach = self._state_rows.reach(pages), len(pages)
        while reach < num_pages and cache.digest(sequence, reach) in self._digests:
            reach += 1
        if self._state_rows.is_used:
            while reach > known and cache.digest(sequence, reach - 1) not in self._snapshots:
                reach -= 1
        saved, left = (reach - known) * page_size, sequence.length - reach * page_size
        if reach <= sequence.num_awaited_pages or saved < min(budget, left):
            return False
        sequence.num_awaited_pages = reach
        num_cached = self._policy.max_cached(sequence.num_prompt_tokens, sequence.length)
        self.held_back[sequence] = 1 + -(-num_cached // page_size)
        return True
