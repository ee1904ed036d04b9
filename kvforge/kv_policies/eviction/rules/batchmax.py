"""Batch-Max (arXiv 2412.05693): eviction while the prompt is computed, so that more sequences fit."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.calendar import Calendar, When, block_of_steps
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True)
class BatchMax(Eviction):
    """Whenever the cache is full, drops the ``block`` tokens with the smallest mean weight over the queries that saw
    them (section 3). ``decode_only`` keeps prompts whole until their end: the paper's baseline."""

    decode_only: int = 0

    name: ClassVar[str] = "batchmax"
    title: ClassVar[str] = "Batch-Max"
    when: ClassVar[When] = When.ALWAYS
    statistic: ClassVar[Statistic] = Statistic.SUM
    optional: ClassVar[frozenset[str]] = frozenset({"decode_only"})

    @property
    def default_block(self) -> int:
        return block_of_steps(self.budget)

    @property
    def calendar(self) -> Calendar:
        return Calendar(self.budget, self.block, When.END_DECODE if self.decode_only else When.ALWAYS)

    def score(self, slots: Slots) -> Tensor:
        return slots.mass / slots.age
