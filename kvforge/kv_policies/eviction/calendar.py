"""When a sequence's cache is full, and how many tokens it keeps then: numbers of its own lengths alone."""

from dataclasses import dataclass
from enum import Enum


class When(Enum):
    """At which counts of computed tokens a cache is cut down."""

    ALWAYS = "whenever the budget is full, in the prompt too"
    END_DECODE = "at the prompt's end, then whenever the budget is full"
    END = "at the prompt's end"


@dataclass(frozen=True)
class Calendar:
    """Evictions of caches of ``budget`` tokens, ``block`` at a time.

    From the first eviction at f on, a cache keeps ``budget - block`` tokens at f, f + block, ... With ``When.END``
    it keeps ``budget`` at f and grows from there. f is the budget, or the prompt's end where that is later.
    """

    budget: int
    block: int
    when: When

    @property
    def kept(self) -> int:
        """Tokens that an eviction leaves."""
        return self.budget if self.when is When.END else self.budget - self.block

    def first(self, num_prompt_tokens: int) -> int | None:
        """Return the computed tokens at the first eviction, None where there is none."""
        if self.when is When.ALWAYS:
            return self.budget
        if self.when is When.END_DECODE:
            return max(num_prompt_tokens, self.budget)
        return num_prompt_tokens if num_prompt_tokens > self.budget else None

    def next(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        """Return the first eviction at ``num_computed`` tokens or later."""
        first = self.first(num_prompt_tokens)
        if first is None or num_computed <= first:
            return first
        if self.when is When.END:
            return None
        return first - (first - num_computed) // self.block * self.block

    def previous(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        """Return the last eviction before ``num_computed`` tokens."""
        first = self.first(num_prompt_tokens)
        if first is None or num_computed <= first:
            return None
        return first if self.when is When.END else first + (num_computed - 1 - first) // self.block * self.block

    def cached(self, num_prompt_tokens: int, num_computed: int) -> int:
        """Return the tokens in the cache, after the eviction at ``num_computed`` where there is one."""
        first = self.first(num_prompt_tokens)
        if first is None or num_computed < first:
            return num_computed
        since = num_computed - first
        return self.kept + (since if self.when is When.END else since % self.block)

    def cached_before(self, num_prompt_tokens: int, num_computed: int) -> int:
        """Return the tokens in the cache before the eviction at ``num_computed``."""
        return num_computed if num_computed == self.first(num_prompt_tokens) else self.budget

    def max_cached(self, num_prompt_tokens: int, num_tokens: int, start: int = 0) -> int:
        """See ``KVPolicy.max_cached``."""
        first = self.first(num_prompt_tokens)
        if first is None or (num_tokens <= first and start < first):
            return num_tokens
        before = first if start < first else 0
        begin = max(start, first)
        grown = self.cached(num_prompt_tokens, begin) + num_tokens - begin
        after = grown if self.when is When.END else min(grown, self.budget)
        return max(before, after)


def block_of_steps(budget: int) -> int:
    """Return a block for rules that evict while a prompt is computed, of which a step then computes no more than that:
    an eighth of the budget, but 64 tokens where half of it has room for them."""
    return max(budget // 8, min(64, budget // 2), 1)
