"""H2O (arXiv 2306.14048): heavy hitters by the attention that they received, and the newest tokens."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True)
class H2O(Eviction):
    """Keeps the newest half of the budget and, of the rest, the tokens with the largest sum of attention weights
    (section 4, algorithm 1)."""

    name: ClassVar[str] = "h2o"
    title: ClassVar[str] = "H2O"
    when: ClassVar[When] = When.END_DECODE
    statistic: ClassVar[Statistic] = Statistic.SUM

    @property
    def num_protected(self) -> int:
        return self.budget // 2

    def score(self, slots: Slots) -> Tensor:
        return slots.protect(slots.mass, slots.newest(self.num_protected))
