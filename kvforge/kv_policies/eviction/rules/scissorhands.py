"""Scissorhands (arXiv 2305.17118): tokens that recent queries paid little attention to go."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True)
class Scissorhands(Eviction):
    """Drops ``block`` tokens that were most often below the average weight, of the last ``history`` queries; the newest
    ``recent`` stay (section 4, algorithm 2, which drops half of the budget at a time: the default block)."""

    history: int = 400
    recent: int = 10

    name: ClassVar[str] = "scissorhands"
    title: ClassVar[str] = "Scissorhands"
    when: ClassVar[When] = When.END_DECODE
    statistic: ClassVar[Statistic] = Statistic.BELOW_AVERAGE

    @property
    def default_block(self) -> int:
        return self.budget // 2

    @property
    def num_observed(self) -> int:
        return self.history

    @property
    def num_protected(self) -> int:
        return self.recent

    def score(self, slots: Slots) -> Tensor:
        return slots.protect(-slots.mass, slots.newest(self.recent))
