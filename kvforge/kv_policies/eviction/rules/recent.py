"""The newest tokens, whole prompts until their end: what eviction in decode is compared with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.policy import Eviction

if TYPE_CHECKING:
    from torch import Tensor

    from kvforge.kv_policies.eviction.slots import Slots


@dataclass(frozen=True)
class Recent(Eviction):
    """Keeps the newest tokens."""

    name: ClassVar[str] = "recent"
    title: ClassVar[str] = "recent tokens"
    when: ClassVar[When] = When.END_DECODE

    def score(self, slots: "Slots") -> "Tensor":
        return slots.position
