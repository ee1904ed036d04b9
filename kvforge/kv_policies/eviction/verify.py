"""Checks on how an exported layer observes the attention that its owner's tokens get."""

from dataclasses import dataclass

from torch.fx import Node

from kvforge.common.graph_nodes import argument, name_of, source_of, takes_columns
from kvforge.kv_policies.eviction.observation import Statistic

_OF_ATTENTION = ("q", "query_start", "kv_length", "page_table", "scale", "k_scale")


@dataclass(frozen=True)
class ObservationCheck:
    """One call before each attention, of the same queries and keys, into the owner's pools."""

    operators: tuple[str, ...]
    statistic: Statistic
    of_attention: tuple[str, ...] = _OF_ATTENTION
    """Arguments that both have the same."""

    def __call__(self, calls: list[Node], attention: Node, pools: dict[str, str]) -> tuple[Node, str] | None:
        """See ``kvforge.kv_policies.state.LayerCheck``."""
        found = [name_of(node) for node in calls]
        count = len(calls) if self.statistic is Statistic.MAXIMUM else 1  # one for each head of a group
        if found != [*self.operators] * max(count, 1):
            return attention, f"follows {found}; a layer that observes calls {self.operators[0]} once before it"
        return next((broken for call in calls if (broken := self._check(call, attention, pools))), None)

    def _check(self, observe: Node, attention: Node, pools: dict[str, str]) -> tuple[Node, str] | None:
        for name in self.of_attention:
            if argument(observe, name) != argument(attention, name):
                return observe, f"takes another {name} than the attention behind it"
        for role in ("k_pool", *(("k_scales",) if "k_scales" in pools else ()), *self.statistic.pool_names):
            if source_of(argument(observe, role)) != pools[role]:
                return observe, f"does not take {role} of the owner whose cache is read next"
        if argument(observe, "kind") != self.statistic.value:
            return observe, f"is of kind {argument(observe, 'kind')}, not what the KV policy says"
        return None


@dataclass(frozen=True)
class ColumnCheck:
    """A layer attends to its owner's pools by column; ``observation`` is what comes before."""

    observation: ObservationCheck | None

    def __call__(self, calls: list[Node], attention: Node, pools: dict[str, str]) -> tuple[Node, str] | None:
        """See ``kvforge.kv_policies.state.LayerCheck``."""
        if self.observation is not None and (broken := self.observation(calls, attention, pools)):
            return broken
        for role in ("k_pool", "v_pool", *(name for name in ("k_scales", "v_scales") if name in pools)):
            if not takes_columns(attention, role):
                return attention, f"does not take {role} by columns"
        return None
