"""Rules whose KV heads share an owner's budget: a head that needs more tokens takes them from one that needs fewer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvforge.common.errors import BuildError
from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.policy import Eviction
from kvforge.kv_policies.policy import Need, OwnerCache
from kvforge.kv_policies.state import (
    EngineMemory,
    InputBuilder,
    LayerCheck,
    NoInputs,
    PolicyState,
    StateInput,
    StatePool,
)

if TYPE_CHECKING:
    from torch import Tensor

_LANE_SLOT = StateInput("lane_slot", neutral=-1)
"""A sequence's row of the pools behind, -1 before its cache is cut down."""


@dataclass(frozen=True)
class HeadBudgets(Eviction):
    """At the prompt's end the heads of an owner keep ``budget`` tokens on average, and at least ``floor_percent`` of
    that each. Heads take whole pages: how many says ``wanted``, which they are the score.

    A sequence keeps as many pages as with equal budgets. A head's part of a page, a *column*, may be any other head's
    (``model_defs.lane_attention``). So nothing that counts pages knows of it.

    Raises:
        BuildError: also for a floor above 100%, and from ``check`` for a budget of parts of pages.
    """

    floor_percent: int = 20

    when: ClassVar[When] = When.END
    is_by_sequence: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset({"floor_percent"})
    views_pools: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.state_inputs = (*cls.state_inputs, _LANE_SLOT)
        cls.needs = cls.needs | {Need.PER_HEAD_LENGTHS}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor_percent > 100:
            raise BuildError(f"{self.name}: floor_percent is {self.floor_percent}; give at most 100.")

    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        if self.budget % page_size:
            pages = self.budget // page_size
            near = " or ".join(str(n * page_size) for n in (pages, pages + 1) if n * page_size >= self.num_protected)
            raise BuildError(
                f"{self.name}: budget {self.budget} is no multiple of the {page_size} tokens of a page; give {near}."
            )

    @property
    def floor(self) -> int:
        """The fewest tokens of a head, before they are rounded up to whole pages."""
        return max(self.budget * self.floor_percent // 100, self.num_protected, 1)

    def min_pages(self, page_size: int) -> int:
        """Return the fewest pages of a head."""
        return -(-self.floor // page_size)

    def max_pages(self, num_kv_heads: int, page_size: int) -> int:
        """Return the most pages that a head gets: all but the others' fewest."""
        return num_kv_heads * (self.budget // page_size) - (num_kv_heads - 1) * self.min_pages(page_size)

    def wanted(self, score: "Tensor") -> list[int]:
        """Return how many tokens each head should keep, by ``score`` ``[kv_heads, L]`` float32, the heads' best tokens
        first in it: ``floor`` and those among the best of all heads' other tokens, ``kv_heads * budget`` in all (AdaKV,
        arXiv 2407.11550, algorithm 1). Of equal scores one of more of its head's best before it comes later, then
        that of a higher head."""
        num_heads, length = score.shape
        floor = min(self.floor, length)
        # Ranks first, so that a stable sort takes equal scores in their order.
        others = score[:, floor:].T.flatten()
        count = num_heads * (self.budget - floor)
        best = others.argsort(descending=True, stable=True)[:count]
        counts = (best % num_heads).bincount(minlength=num_heads)
        return [floor + int(more) for more in counts.tolist()]

    def _slot_bytes(self, cache: OwnerCache) -> int:
        return 4 * cache.num_kv_heads * (1 + self.max_pages(cache.num_kv_heads, cache.page_size))

    def state_pools(self, num_kv_heads: int, head_dim: int, page_size: int) -> tuple[StatePool, ...]:
        """Beside positions and statistics, of each running sequence the columns of its heads."""
        width = self.max_pages(num_kv_heads, page_size)
        return (
            *super().state_pools(num_kv_heads, head_dim, page_size),
            StatePool("lane_pages", "sequences", (num_kv_heads,), "int32"),
            StatePool("lane_table", "sequences", (num_kv_heads, width), "int32"),
        )

    def layer_insertion(self) -> Any:
        """See ``model_defs.lane_attention``."""
        from model_defs.lane_attention import LaneObservation

        kind = None if self.statistic is None else self.statistic.value
        return LaneObservation(kind, num_pools=len(self.state_pools(1, 1, 1)), budget=self.budget)

    def layer_check(self) -> LayerCheck | None:
        from kvforge.kv_policies.eviction.verify import ColumnCheck, ObservationCheck

        observation = None
        if self.statistic is not None:
            observation = ObservationCheck(self.operators, self.statistic, of_attention=("scale", "k_scale"))
        return ColumnCheck(observation)

    def make_input_builder(self, page_size: int, max_num_seqs: int, max_state_pages: int) -> InputBuilder:
        from kvforge.kv_policies.eviction.lane_inputs import LaneInputs

        observed = super().make_input_builder(page_size, max_num_seqs, max_state_pages)
        return LaneInputs(None if isinstance(observed, NoInputs) else observed, max_num_seqs)

    def make_state(self, memory: EngineMemory) -> PolicyState:
        from kvforge.kv_policies.eviction.lanes import LaneState

        return LaneState(self, memory)
