"""Checks on how an exported layer selects chunks of its owner's prompt (ShadowKV)."""

from dataclasses import dataclass

from torch.fx import Node

from kvforge.common.graph_nodes import argument, name_of, source_of

_POOLS = (
    ("landmarks", "is_outlier"),
    ("cached", "counts"),
    ("u", "sv", "host_v", "k_pool", "v_pool"),
)
"""The arguments of each that are pools."""


@dataclass(frozen=True)
class SelectionCheck:
    """The three ``operators``, once each and in order: they take the owner's pools, the queries that attention takes
    and the results of one another."""

    operators: tuple[str, ...]
    chunk_size: int
    max_selected: int

    def __call__(self, calls: list[Node], attention: Node, pools: dict[str, str]) -> tuple[Node, str] | None:
        """See ``kvforge.kv_policies.state.LayerCheck``."""
        if [name_of(node) for node in calls] != list(self.operators):
            return (
                attention,
                f"follows {[name_of(node) for node in calls]}; a layer that selects chunks calls each of "
                + (", ".join(self.operators) + " once before it"),
            )
        for node, roles in zip(calls, _POOLS, strict=True):
            for role in roles:
                if source_of(argument(node, role)) != pools[role]:
                    return node, f"does not take {role} of the owner whose cache is read next"
        select, update, write = calls
        chosen = (argument(select, "max_selected"), argument(write, "chunk_size"))
        if chosen != (self.max_selected, self.chunk_size):
            return select, f"selects {chosen[0]} chunks of {chosen[1]} tokens, not what the KV policy says"
        links = (
            (select, "q", argument(attention, "q")),
            (select, "query_start", argument(attention, "query_start")),
            (update, "selected", select),
            (write, "slot", argument(update, "slot")),
            (write, "shadow_table", argument(select, "table")),
            (write, "page_table", argument(attention, "page_table")),
        )
        for node, name, source in links:
            if argument(node, name) is not source:
                return node, f"takes another {name} than the layer's own"
        for index, name in enumerate(("chunks", "places")):
            value = argument(write, name)
            if not (isinstance(value, Node) and value.args == (update, index)):
                return write, f"takes other {name} than {update.name} gives"
        return None
