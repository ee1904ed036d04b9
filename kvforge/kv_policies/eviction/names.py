"""The names of what a rule is given, for annotations: a rule's numbers alone need no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kvforge.kv_policies.eviction.budget_lanes import ScoredLanes
    from kvforge.kv_policies.eviction.slots import Slots
else:
    ScoredLanes = Slots = Tensor = Any
