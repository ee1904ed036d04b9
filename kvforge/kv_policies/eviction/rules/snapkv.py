"""SnapKV (arXiv 2404.14469): the prompt's tokens that its last queries attend to."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True)
class SnapKV(Eviction):
    """At the prompt's end, keeps its last ``window`` tokens and those before them that got most attention from these,
    as means over ``kernel`` neighbours (section 4.1); what is generated stays."""

    window: int = 32
    kernel: int = 5

    name: ClassVar[str] = "snapkv"
    title: ClassVar[str] = "SnapKV"
    when: ClassVar[When] = When.END
    statistic: ClassVar[Statistic] = Statistic.SUM

    @property
    def num_observed(self) -> int:
        return self.window

    @property
    def num_protected(self) -> int:
        return self.window

    def score(self, slots: Slots) -> Tensor:
        window = slots.newest(self.window)
        return slots.protect(slots.pooled(slots.mass * ~window, self.kernel), window)
