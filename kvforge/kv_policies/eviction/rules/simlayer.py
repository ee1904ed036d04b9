"""SimLayerKV (arXiv 2410.13846): lazy layers keep the first tokens and the newest, the others everything."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.budgets.ceiling import CeilingBudget
from kvforge.kv_policies.eviction.names import ScoredLanes, Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic


@dataclass(frozen=True)
class SimLayerKV(CeilingBudget):
    """The lazier an owner is, the more of the last prompt token's attention goes to the first ``sinks`` tokens and the
    newest ``recent`` (section 3.2). Lazy owners keep these. The least lazy keep all that they have, up to
    ``ceiling_percent`` of the budget, as many as the budget of all has room for; one between keeps what is left over.

    The paper has a threshold of laziness in place of a budget, so that a sequence's bytes depend on its text. Here the
    threshold follows from the budget. ``recent`` 0 stands for a quarter of the budget with the sinks.

    Raises:
        BuildError: also for more tokens of lazy owners than the budget.
    """

    sinks: int = 4
    recent: int = 0

    name: ClassVar[str] = "simlayer"
    title: ClassVar[str] = "SimLayerKV"
    statistic: ClassVar[Statistic] = Statistic.SUM
    optional: ClassVar[frozenset[str]] = frozenset({"sinks"})

    def __post_init__(self) -> None:
        if self.recent == 0:
            object.__setattr__(self, "recent", max(self.budget // 4 - self.sinks, 1))
        super().__post_init__()

    @property
    def num_observed(self) -> int:
        return 1

    @property
    def num_protected(self) -> int:
        return self.sinks + self.recent

    def score(self, slots: Slots) -> Tensor:
        return slots.protect(slots.position, slots.position < self.sinks)

    def laziness(self, slots: Slots) -> float:
        """Return the share of the attention that goes to the tokens that lazy owners keep, all heads together."""
        lazy = slots.newest(self.recent) | (slots.position < self.sinks)
        return float((slots.mass * lazy).sum() / slots.mass.sum())

    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]:
        num_heads, length = owners[0].best.shape
        most = min(self.max_pages(num_heads, page_size), length // page_size)
        fewest = -(-self.num_protected // page_size)
        laziness = [self.laziness(owner.slots) for owner in owners]
        pages = [fewest] * len(owners)
        spare = len(owners) * (self.budget // page_size - fewest)
        for owner in sorted(range(len(owners)), key=lambda owner: laziness[owner]):
            more = min(most - fewest, spare)
            pages[owner] += more
            spare -= more
        return [[n] * num_heads for n in pages]
