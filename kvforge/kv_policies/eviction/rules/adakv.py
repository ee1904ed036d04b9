"""AdaKV (arXiv 2407.11550) over SnapKV's scores: heads whose attention is spread keep more of the prompt."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvforge.kv_policies.eviction.head_budgets import HeadBudgets
from kvforge.kv_policies.eviction.observation import Statistic

if TYPE_CHECKING:
    from torch import Tensor

    from kvforge.kv_policies.eviction.slots import Slots


@dataclass(frozen=True)
class AdaKV(HeadBudgets):
    """At the prompt's end, the best of all heads' tokens together stay, by SnapKV's scores (section 3.3, Ada-SnapKV),
    and ``floor_percent`` of the budget in each head."""

    window: int = 32
    kernel: int = 5

    name: ClassVar[str] = "adakv"
    title: ClassVar[str] = "AdaKV"
    statistic: ClassVar[Statistic] = Statistic.SUM

    @property
    def num_observed(self) -> int:
        return self.window

    @property
    def num_protected(self) -> int:
        return self.window

    def score(self, slots: "Slots") -> "Tensor":
        return slots.attended_by_window(self.window, self.kernel)
