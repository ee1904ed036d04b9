"""TOVA (arXiv 2401.06104): the tokens that the newest query attends to most."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True)
class Tova(Eviction):
    """Keeps the tokens with the largest weights of the last query before an eviction, averaged over all heads of the
    layer, so that all heads keep the same tokens (section 3.2)."""

    name: ClassVar[str] = "tova"
    title: ClassVar[str] = "TOVA"
    when: ClassVar[When] = When.END_DECODE
    statistic: ClassVar[Statistic] = Statistic.SUM

    @property
    def num_observed(self) -> int:
        return 1

    def score(self, slots: Slots) -> Tensor:
        return slots.over_heads(slots.mass)
