"""PyramidKV's budgets (arXiv 2406.02069): from owner to owner fewer tokens, along a line."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from kvforge.kv_policies.eviction.budgets.around import AroundRule
from kvforge.kv_policies.eviction.names import ScoredLanes


@dataclass(frozen=True, init=False)
class PyramidBudgets(AroundRule):
    """The heads of the last owner keep ``budget / beta`` tokens, those of the first as many more than ``budget`` as
    these fewer, those between lie on a line (section 4.2). No head keeps fewer than the rule protects, or more than
    there are: then the line is flatter."""

    beta: int = 20

    wrapper_name: ClassVar[str] = "pyramid"
    owners_share: ClassVar[bool] = True

    @property
    def lowest(self) -> Fraction:
        """Tokens of a head of the last owner, where the prompt is long enough."""
        return max(Fraction(self.budget, self.beta), Fraction(max(self.num_protected, 1)))

    def max_pages(self, num_kv_heads: int, page_size: int) -> int:
        return -(-int(2 * self.budget - self.lowest) // page_size) + 1

    def wanted(self, num_owners: int, length: int) -> list[Fraction]:
        """Return the tokens of a head of each owner, of prompts of ``length`` tokens."""
        highest = min(2 * self.budget - self.lowest, Fraction(length))
        step = 2 * (highest - self.budget) / max(num_owners - 1, 1)
        return [highest - owner * step if num_owners > 1 else Fraction(self.budget) for owner in range(num_owners)]

    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]:
        return self.divide_owners(owners, self.wanted(len(owners), owners[0].best.shape[1]), page_size)
