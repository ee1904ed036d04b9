"""Budgets around a rule: heads share them by the rule's scores, whichever rule it is."""

from dataclasses import Field, dataclass, field, fields
from typing import ClassVar

from kvforge.kv_policies.capabilities import Wrapping
from kvforge.kv_policies.eviction.budgets.shared import SharedBudget
from kvforge.kv_policies.eviction.names import Slots, Tensor
from kvforge.kv_policies.eviction.noted import NotesTokens
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.eviction.policy import Eviction


@dataclass(frozen=True, init=False)
class AroundRule(SharedBudget, Wrapping):
    """Shared budgets by the scores of ``rule``, which is made of ``kind`` and those parameters that are not the
    budgets' own. It observes what its rule does, and protects as many tokens."""

    rule: Eviction = field(init=False)

    kind: ClassVar[type[Eviction]]
    """The default of a class that has a name of its own."""

    def __init__(self, kind: type[Eviction] | None = None, **parameters: int) -> None:
        own = {one.name: parameters.pop(one.name, one.default) for one in self._own_fields()}
        rule = (kind or self.kind)(**parameters, is_wrapped=True)
        values = {"rule": rule, "budget": rule.budget, "block": rule.block, "is_wrapped": False}
        for name, value in (values | own).items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @classmethod
    def can_wrap(cls, policy: type) -> bool:
        """Rules that evict as ``EvictionState`` does and note nothing."""
        is_rule = issubclass(policy, Eviction) and policy.make_state is Eviction.make_state
        return is_rule and not issubclass(policy, NotesTokens)

    @classmethod
    def _own_fields(cls) -> list[Field[int]]:
        inherited = {one.name for one in fields(Eviction)}
        return [one for one in fields(cls) if one.type is int and one.name not in inherited]

    @property
    def name(self) -> str:
        return f"{self.rule.name}+{self.wrapper_name}"

    @property
    def title(self) -> str:
        return f"{self.rule.title} with the budgets of {self.wrapper_name}"

    @property
    def parameters(self) -> dict[str, int]:
        return self.rule.parameters | {one.name: getattr(self, one.name) for one in self._own_fields()}

    @property
    def optional(self) -> frozenset[str]:
        return self.rule.optional

    @property
    def statistic(self) -> Statistic | None:
        return self.rule.statistic

    @property
    def num_observed(self) -> int:
        return self.rule.num_observed

    @property
    def num_protected(self) -> int:
        return self.rule.num_protected

    def score(self, slots: Slots) -> Tensor:
        return self.rule.score(slots)
