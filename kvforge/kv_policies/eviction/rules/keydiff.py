"""KeyDiff (arXiv 2504.15364): keys that resemble the others go."""

from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.calendar import When, block_of_steps
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True)
class KeyDiff(Eviction):
    """Keeps the tokens whose keys are least similar to the mean of all normed keys in the cache (section 3.2)."""

    name: ClassVar[str] = "keydiff"
    title: ClassVar[str] = "KeyDiff"
    when: ClassVar[When] = When.ALWAYS
    is_by_sequence: ClassVar[bool] = True

    @property
    def default_block(self) -> int:
        return block_of_steps(self.budget)

    def score(self, slots: Slots) -> Tensor:
        return -slots.key_similarity()
