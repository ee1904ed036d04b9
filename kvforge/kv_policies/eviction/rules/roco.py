"""RoCo (arXiv 2402.06262): tokens by their mean attention, those whose attention varies most being kept."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.calendar import When, block_of_steps
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True)
class RoCo(Eviction):
    """Of the tokens that are neither among the first ``sinks`` nor the ``spread`` with the largest standard deviation
    of their weights, drops those with the smallest mean weight (section 4)."""

    sinks: int = 4
    spread: int = 64

    name: ClassVar[str] = "roco"
    title: ClassVar[str] = "RoCo"
    when: ClassVar[When] = When.ALWAYS
    statistic: ClassVar[Statistic] = Statistic.SUM_AND_SQUARES
    optional: ClassVar[frozenset[str]] = frozenset({"sinks", "spread"})

    @property
    def default_block(self) -> int:
        return block_of_steps(self.budget)

    @property
    def num_protected(self) -> int:
        return self.sinks + self.spread

    def score(self, slots: Slots) -> Tensor:
        mean = slots.mass / slots.age
        variance = (slots.squares / slots.age - mean * mean).clamp(min=0.0)
        return slots.protect(mean, slots.largest(variance, self.spread) | (slots.position < self.sinks))
