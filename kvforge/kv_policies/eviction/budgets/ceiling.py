"""Budgets that owners share and that may give one head several times what there is on average."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.common.errors import BuildError
from kvforge.kv_policies.eviction.budgets.shared import SharedBudget
from kvforge.kv_policies.policy import check_largest

MAX_CEILING = 3200
"""Per cent of the budget: a table of columns is as wide as the most that a head may keep."""


@dataclass(frozen=True)
class CeilingBudget(SharedBudget):
    """Owners share, and no head keeps more than ``ceiling_percent`` of the budget.

    Raises:
        BuildError: also for a ceiling below 100%.
    """

    ceiling_percent: int = 400

    owners_share: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_largest(self, "ceiling_percent", MAX_CEILING)
        if self.ceiling_percent < 100:
            raise BuildError(f"{self.name}: ceiling_percent is {self.ceiling_percent}; give at least 100.")

    def max_pages(self, num_kv_heads: int, page_size: int) -> int:
        return self.budget * self.ceiling_percent // 100 // page_size
