"""The newest tokens, whole prompts until their end: what eviction in decode is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True)
class Recent(Eviction):
    """Keeps the newest tokens."""

    name: ClassVar[str] = "recent"
    title: ClassVar[str] = "recent tokens"
    when: ClassVar[When] = When.END_DECODE

    def score(self, slots: Slots) -> Tensor:
        return slots.position
