"""A KV policy that evicts: it keeps a budget of tokens in each KV head, chosen by a rule's score."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvforge.common.errors import BuildError
from kvforge.kv_policies.capabilities import Insertion, Keeping, Observing
from kvforge.kv_policies.eviction.calendar import Calendar, When
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.observation import OBSERVATION_INPUTS, Statistic
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import BASIC_NEEDS, KVPolicy, Need, check_parameters
from kvforge.kv_policies.state import (
    EngineMemory,
    InputBuilder,
    LayerCheck,
    NoInputs,
    PolicyState,
    StateInput,
    StatePool,
)

NOT_OBSERVED = 2**31 - 1
"""A position beyond all."""


@dataclass(frozen=True)
class Eviction(Keeping, Insertion, Observing, KVPolicy):
    """Every KV head of an owner keeps as many tokens, its own ones; the pages of what it drops are free for others.

    A rule is a subclass in ``rules/``: its score, what it observes (``statistic`` of ``num_observed`` queries), when it
    evicts (``when``), and how many tokens it protects. ``budget`` is the most tokens in the cache (at the prompt's end,
    for rules that only evict there), ``block`` how many are evicted at a time; 0 stands for the rule's own
    ``default_block``.

    Raises:
        BuildError: a parameter below 1 (those that may be 0 are ``optional``), above ``MAX_PARAMETER``, a block that
            is not below the budget, or a budget that does not leave room for what the rule protects.
    """

    budget: int = 512
    block: int = 0
    is_wrapped: bool = field(default=False, kw_only=True, repr=False)
    """Shared budgets are around it, which evict in its place and check what is given for both."""

    when: ClassVar[When]
    is_by_sequence: ClassVar[bool] = False
    """Scores reduce over tokens or dimensions, so they are computed of one sequence at a time: the last bits must not
    depend on others."""
    rewrites_pages: ClassVar[bool] = True
    counters: ClassVar[Mapping[str, str]] = {
        "evictions": "Times that a sequence's cache was cut down to its budget",
        "evicted_tokens": "Tokens that were evicted, each counted once for all layers",
    }

    def __post_init__(self) -> None:
        if self.block == 0:
            object.__setattr__(self, "block", self.default_block)
        if self.is_wrapped:
            return
        check_parameters(self, self.optional)
        if self.block >= self.budget:
            raise BuildError(f"{self.name}: block {self.block} must be below budget {self.budget}.")
        if self.num_protected > self.calendar.kept:
            raise BuildError(
                f"{self.name}: an eviction leaves {self.calendar.kept} tokens, but {self.num_protected} are protected; "
                "raise budget or lower what is protected."
            )

    # -- a rule ------------------------------------------------------------------------------------------------

    @property
    def statistic(self) -> Statistic | None:
        """What is observed; None for rules that look at positions or keys."""
        return None

    @property
    def optional(self) -> frozenset[str]:
        """Parameters that may be 0."""
        return frozenset()

    @property
    def default_block(self) -> int:
        """How many tokens are evicted at a time unless told otherwise."""
        return 1

    @property
    def num_observed(self) -> int:
        """How many queries before each eviction are observed, of those since the eviction before; 0 for all since the
        sequence began."""
        return 0

    @property
    def num_protected(self) -> int:
        """Tokens of a full cache that the rule always keeps."""
        return 0

    @abstractmethod
    def score(self, slots: Slots) -> Tensor:
        """Return ``[S, kv_heads, L]`` float32: the tokens with the largest stay, of equals the newer one."""

    @property
    def needs(self) -> frozenset[Need]:
        needs = BASIC_NEEDS | {Need.HISTORY_MUTATION, Need.CACHE_PER_LAYER, Need.ONE_QUERY, Need.GLOBAL_ATTENTION}
        if self.statistic is None:
            return needs
        return needs | {Need.ATTENTION_SCORES, *((Need.ALL_QUERIES,) if self.num_observed == 0 else ())}

    # -- numbers -----------------------------------------------------------------------------------------------

    @property
    def calendar(self) -> Calendar:
        """When it evicts."""
        return Calendar(self.budget, self.block, self.when)

    def next_transition(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        return self.calendar.next(num_prompt_tokens, num_computed)

    def num_cached(self, num_prompt_tokens: int, num_computed: int) -> int:
        return self.calendar.cached(num_prompt_tokens, num_computed)

    def max_cached(self, num_prompt_tokens: int, num_tokens: int, start: int = 0) -> int:
        return self.calendar.max_cached(num_prompt_tokens, num_tokens, start)

    def max_reusable(self, num_prompt_tokens: int) -> int | None:
        """Tokens before the first observed query: a hit brings no observations of the queries that it skips."""
        observed = self.observe_from(num_prompt_tokens, 0)
        return None if observed == NOT_OBSERVED else observed

    def observe_from(self, num_prompt_tokens: int, num_computed: int) -> int:
        """Return the position from which on queries are observed, after the eviction at ``num_computed`` tokens or
        before the first."""
        if self.statistic is None:
            return NOT_OBSERVED
        calendar = self.calendar
        following = calendar.next(num_prompt_tokens, num_computed + 1)
        if following is None:
            return NOT_OBSERVED
        if self.num_observed == 0:
            return 0
        since = calendar.previous(num_prompt_tokens, num_computed + 1) or 0
        return max(since, following - self.num_observed)

    def num_observers(self, num_prompt_tokens: int, start: int, end: int) -> int:
        return max(end - max(start, self.observe_from(num_prompt_tokens, start)), 0)

    @property
    def observing(self) -> Observing | None:
        return self if Need.ATTENTION_SCORES in self.needs else None

    def num_state_pages(self, num_prompt_tokens: int, page_size: int) -> int:
        """One for each page of the largest cache that is still cut down."""
        first = self.calendar.first(num_prompt_tokens)
        return 0 if first is None else -(-max(first, self.budget) // page_size)

    @property
    def slot_columns(self) -> tuple[str, ...]:
        return () if self.statistic is None else ("observe_from",)

    def slot_values(self, num_prompt_tokens: int, num_computed: int) -> tuple[int, ...]:
        if self.statistic is None:
            return ()
        return (self.observe_from(num_prompt_tokens, num_computed),)

    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        num_computed = num_prompt_tokens + num_generated_tokens
        cached = self.num_cached(num_prompt_tokens, num_computed)
        state = self.num_state_pages(num_prompt_tokens, cache.page_size) * cache.page_size * self._state_bytes(cache)
        slot = self._slot_bytes(cache) if cached < num_computed else 0
        return cache.padded(cached) * cache.token_bytes + state + slot

    def prefill_bytes(self, cache: OwnerCache, num_prompt_tokens: int) -> int:
        """Pages of the prompt at its largest, less those that it keeps."""
        most = self.max_cached(num_prompt_tokens, num_prompt_tokens)
        kept = self.num_cached(num_prompt_tokens, num_prompt_tokens)
        return (cache.padded(most) - cache.padded(kept)) * cache.token_bytes

    def device_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """K and V of what is cached; keys once more, and the statistics, where decode queries are observed."""
        cached = self.num_cached(num_prompt_tokens, num_prompt_tokens + num_generated_tokens)
        num_bytes = cached * cache.token_bytes
        if self.statistic is not None and self.when is not When.END:
            statistics = 8 * len(self.statistic.pool_names) * cache.num_kv_heads
            num_bytes += cached * (cache.token_bytes // 2 + statistics)
        return num_bytes

    def _state_bytes(self, cache: OwnerCache) -> int:
        """Of a token: its position and statistics, 4 bytes each, in every KV head."""
        names = () if self.statistic is None else self.statistic.pool_names
        return 4 * cache.num_kv_heads * (1 + len(names))

    def _slot_bytes(self, cache: OwnerCache) -> int:
        """Of a sequence once it has evicted, whatever its length."""
        return 0

    # -- memory and graphs -------------------------------------------------------------------------------------

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """position of the token in each place, then the statistics; places that no eviction has seen have none."""
        names = () if self.statistic is None else self.statistic.pool_names
        shape = (cache.page_size, cache.num_kv_heads)
        return (
            StatePool("position", "pages", shape, "int32"),
            *(StatePool(name, "pages", shape, "float32") for name in names),
        )

    @property
    def state_inputs(self) -> tuple[StateInput, ...]:
        return () if self.statistic is None else OBSERVATION_INPUTS

    @property
    def operators(self) -> tuple[str, ...]:
        return () if self.statistic is None else ("kvforge::attention_mass",)

    def layer_insertion(self) -> Any:
        """See ``model_defs.cache_observation``."""
        from model_defs.cache_observation import CacheObservation

        kind = None if self.statistic is None else self.statistic.value
        return CacheObservation(kind, num_pools=len(self.named_pools))

    def layer_check(self) -> LayerCheck | None:
        if self.statistic is None:
            return None
        from kvforge.kv_policies.eviction.verify import ObservationCheck

        return ObservationCheck(self.operators, self.statistic)

    def activation_bytes(self, num_heads: int, num_kv_heads: int, max_seq_len: int) -> int:
        """A query's logits of all slots."""
        return 0 if self.statistic is None else 4 * num_heads * self.max_cached(max_seq_len, max_seq_len)

    # -- at run time -------------------------------------------------------------------------------------------

    def make_input_builder(self, page_size: int, max_num_seqs: int, max_state_pages: int) -> InputBuilder:
        if not self.state_inputs:
            return NoInputs()
        from kvforge.kv_policies.eviction.inputs import CombinedInputs

        return CombinedInputs(self.state_inputs, page_size, max_num_seqs, max_state_pages)

    def make_state(self, memory: EngineMemory) -> PolicyState:
        from kvforge.kv_policies.eviction.state import EvictionState

        return EvictionState(self, memory)

    def report(self, counters: Mapping[str, int]) -> dict[str, float]:
        return {"evicted_tokens": counters["evicted_tokens"]}
