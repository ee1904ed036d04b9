"""SqueezeAttention's budgets (arXiv 2404.04793): layers whose attention changes little keep few tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from kvforge.kv_policies.eviction.budgets.around import AroundRule
from kvforge.kv_policies.eviction.budgets.ceiling import CeilingBudget
from kvforge.kv_policies.eviction.names import ScoredLanes
from kvforge.kv_policies.eviction.noted import NotesTokens
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import check_largest
from kvforge.kv_policies.state import StatePool


@dataclass(frozen=True, init=False)
class SqueezeBudgets(AroundRule, NotesTokens, CeilingBudget):
    """Owners fall into three groups by the mean cosine of hidden states before and after their attention. Those of the
    group with the largest cosines keep ``share_percent`` of the budget, the others share what is left (algorithm 1).

    The cosines are those of the prompt's last ``similar`` tokens, the only ones that all layers compute where the model
    has a cut; the paper takes the whole prompt.

    Raises:
        BuildError: also for a share above 100%.
    """

    share_percent: int = 35
    similar: int = 32

    wrapper_name: ClassVar[str] = "squeeze"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_largest(self, "share_percent", 100)
        check_largest(self, "similar", 4096)

    @property
    def num_noted(self) -> int:
        return self.similar

    def _slot_bytes(self, cache: OwnerCache) -> int:
        return super()._slot_bytes(cache) + 4 * (self.similar + 1)

    def state_pools(self, cache: OwnerCache) -> tuple[StatePool, ...]:
        """Beside the others', the cosines of each running sequence, and a place for those that are not noted."""
        *pools, lane_pages, lane_table = super().state_pools(cache)
        similarity = StatePool("similarity", "sequences", (self.similar + 1,), "float32")
        return (*pools, similarity, lane_pages, lane_table)

    def wanted(self, cosines: Sequence[float]) -> list[Fraction]:
        """Return the tokens of a head of each owner."""
        groups = three_groups(cosines)
        num_top = groups.count(2)
        least = max(Fraction(self.budget * self.share_percent, 100), Fraction(self.num_protected))
        more = (len(groups) * self.budget - num_top * least) / max(len(groups) - num_top, 1)
        return [least if group == 2 else more for group in groups]

    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]:
        noted = min(self.similar, owners[0].best.shape[1])  # behind it lies what another sequence left
        cosines = [float(owner.slots.notes("similarity")[0, :noted].double().mean()) for owner in owners]
        return self.divide_owners(owners, self.wanted(cosines), page_size)

    def layer_insertion(self) -> Any:
        """See ``model_defs.similarity``."""
        from model_defs.similarity import SimilarLanes

        return SimilarLanes(**vars(super().layer_insertion()))


def three_groups(values: Sequence[float]) -> list[int]:
    """Return 0, 1 or 2 for each value: the groups, from the smallest on, with the least sum of squared distances from
    their means. Of fewer than three different values there are as many groups, the first ones."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ordered = [values[i] for i in order]
    count = len(values)

    def cost(begin: int, end: int) -> float:
        part = ordered[begin:end]
        mean = sum(part) / len(part)
        return sum((x - mean) ** 2 for x in part)

    if len(set(values)) < 3:
        return [sorted(set(values)).index(x) for x in values]
    cuts = ((one, two) for one in range(1, count - 1) for two in range(one + 1, count))
    first, second = min(cuts, key=lambda cut: cost(0, cut[0]) + cost(*cut) + cost(cut[1], count))
    groups = [0] * count
    for place, index in enumerate(order):
        groups[index] = (place >= first) + (place >= second)
    return groups
