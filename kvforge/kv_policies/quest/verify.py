"""Checks on how an exported layer selects chunks of its owner's prompt (Quest)."""

from dataclasses import dataclass

from torch.fx import Node

from kvforge.common.graph_nodes import argument, name_of, source_of, takes_columns


@dataclass(frozen=True)
class BoundsCheck:
    """One call of LandmarkSelect on the owner's bounds, then attention to parts of the owner's pages."""

    operators: tuple[str, ...]
    max_selected: int

    def __call__(self, calls: list[Node], attention: Node, pools: dict[str, str]) -> tuple[Node, str] | None:
        """See ``kvforge.kv_policies.state.LayerCheck``."""
        if tuple(name_of(node) for node in calls) != self.operators:
            found = [name_of(node) for node in calls]
            return attention, f"follows {found}; a layer that reads chunks calls {self.operators[0]} once before it"
        (select,) = calls
        for name, role in (("landmarks", "bounds"), ("is_outlier", "never")):
            if source_of(argument(select, name)) != pools[role]:
                return select, f"does not take {role} of the owner whose cache is read next"
        if argument(select, "max_selected") != self.max_selected:
            return select, f"selects {argument(select, 'max_selected')} chunks, not what the KV policy says"
        if argument(select, "scale") != argument(attention, "scale"):
            return select, "takes another scale than the attention behind it"
        for role in ("k_pool", "v_pool"):
            if not takes_columns(attention, role):
                return attention, f"does not take {role} by columns"
        return None
