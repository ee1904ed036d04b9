"""AdaKV's budgets (arXiv 2407.11550): heads whose attention is spread keep more, of what an owner's heads have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.budgets.around import AroundRule
from kvforge.kv_policies.eviction.budgets.division import best_of_all, divide_pages
from kvforge.kv_policies.eviction.names import ScoredLanes, Tensor
from kvforge.kv_policies.policy import check_largest


@dataclass(frozen=True, init=False)
class HeadBudgets(AroundRule):
    """The heads of an owner keep ``budget`` tokens on average, and at least ``floor_percent`` of that each.

    Raises:
        BuildError: also for a floor above 100%.
    """

    floor_percent: int = 20

    wrapper_name: ClassVar[str] = "adakv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_largest(self, "floor_percent", 100)

    @property
    def optional(self) -> frozenset[str]:
        return super().optional | {"floor_percent"}

    @property
    def floor(self) -> int:
        """The fewest tokens of a head, before they are rounded up to whole pages."""
        return max(self.budget * self.floor_percent // 100, self.num_protected, 1)

    def min_pages(self, page_size: int) -> int:
        """Return the fewest pages of a head."""
        return -(-self.floor // page_size)

    def max_pages(self, num_kv_heads: int, page_size: int) -> int:
        """All but the others' fewest."""
        return num_kv_heads * (self.budget // page_size) - (num_kv_heads - 1) * self.min_pages(page_size)

    def wanted(self, score: Tensor) -> list[int]:
        """Return how many tokens each head should keep (algorithm 1), by ``score`` ``[kv_heads, L]`` float32, the
        heads' best tokens first in it."""
        return best_of_all(score, self.floor, self.budget)

    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]:
        (owner,) = owners
        num_heads, length = owner.best.shape
        most = min(self.max_pages(num_heads, page_size), length // page_size)
        total = num_heads * (self.budget // page_size)
        return [divide_pages(self.wanted(owner.best), total, page_size, self.min_pages(page_size), most)]
