"""Rules whose KV heads share a budget: a head that needs more tokens takes them from one that needs fewer."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from kvforge.common.errors import BuildError
from kvforge.kv_policies.eviction.budgets.division import divide_pages
from kvforge.kv_policies.eviction.calendar import Calendar, When
from kvforge.kv_policies.eviction.names import ScoredLanes
from kvforge.kv_policies.eviction.observation import LANE_INPUTS
from kvforge.kv_policies.eviction.policy import Eviction
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import Need
from kvforge.kv_policies.state import (
    EngineMemory,
    LayerCheck,
    PolicyState,
    StateInput,
    StatePool,
)


@dataclass(frozen=True)
class SharedBudget(Eviction):
    """At the prompt's end KV heads keep ``budget`` tokens on average, in whole pages; how many each, says ``divide``.

    A sequence keeps as many pages as with equal budgets. A head's part of a page, a *column*, may be any other head's
    (``model_defs.lane_attention``). So nothing that counts pages knows of it. Heads share with those of their owner, or
    with those of all owners where ``owners_share``.

    Raises:
        BuildError: also from ``check`` for a budget of parts of pages.
    """

    when: ClassVar[When] = When.END
    is_by_sequence: ClassVar[bool] = True
    views_pools: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {Need.PER_HEAD_LENGTHS}

    @property
    def state_inputs(self) -> tuple[StateInput, ...]:
        return (*super().state_inputs, *LANE_INPUTS)

    @property
    def calendar(self) -> Calendar:
        return Calendar(self.budget, self.block, When.END)

    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        if self.budget % page_size:
            pages, least = self.budget // page_size, max(self.num_protected, self.block + 1)
            near = " or ".join(str(n * page_size) for n in (pages, pages + 1) if n * page_size >= least)
            raise BuildError(
                f"{self.name}: budget {self.budget} is no multiple of the {page_size} tokens of a page; give {near}."
            )

    @abstractmethod
    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]:
        """Return the pages of each owner's heads: on average ``budget // page_size``, none more than ``max_pages`` or
        than its tokens fill. ``owners`` are those that share: all, or a single one."""

    def divide_owners(
        self, owners: Sequence[ScoredLanes], wanted: Sequence[Fraction], page_size: int
    ) -> list[list[int]]:
        """Return pages as ``divide`` does, as many for every head of an owner: those of about ``wanted`` tokens, and of
        no fewer than the rule protects."""
        num_heads, length = owners[0].best.shape
        most = min(self.max_pages(num_heads, page_size), length // page_size)
        fewest = -(-max(self.num_protected, 1) // page_size)
        total = len(owners) * (self.budget // page_size)
        return [[n] * num_heads for n in divide_pages(wanted, total, page_size, fewest, most)]

    @abstractmethod
    def max_pages(self, num_kv_heads: int, page_size: int) -> int:
        """Return the most pages that a head gets."""

    def _slot_bytes(self, cache: OwnerCache) -> int:
        return 4 * cache.num_kv_heads * (1 + self.max_pages(cache.num_kv_heads, cache.page_size))

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """Beside positions and statistics, of each running sequence the columns of its heads."""
        width = self.max_pages(cache.num_kv_heads, cache.page_size)
        return (
            *super().state_pools(cache),
            StatePool("lane_pages", "sequences", (cache.num_kv_heads,), "int32"),
            StatePool("lane_table", "sequences", (cache.num_kv_heads, width), "int32"),
        )

    def layer_insertion(self) -> Any:
        """See ``model_defs.lane_attention``."""
        from model_defs.lane_attention import LaneObservation

        return LaneObservation(
            None if self.statistic is None else self.statistic.value,
            num_pools=len(self.named_pools),
            owners_share=self.owners_share,
            budget=self.budget,
        )

    def layer_check(self) -> LayerCheck | None:
        from kvforge.kv_policies.eviction.verify import ColumnCheck, ObservationCheck

        observation = None
        if self.statistic is not None:
            observation = ObservationCheck(self.operators, self.statistic, of_attention=("scale", "k_scale"))
        return ColumnCheck(observation)

    def make_state(self, memory: EngineMemory) -> PolicyState:
        from kvforge.kv_policies.eviction.budget_lanes import LaneState

        return LaneState(self, memory)
