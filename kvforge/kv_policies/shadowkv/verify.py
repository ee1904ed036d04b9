"""Checks on how an exported layer selects chunks of its owner's prompt (ShadowKV)."""

from dataclasses import dataclass

from torch.fx import Node

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
        if [_name(node) for node in calls] != list(self.operators):
            return (
                attention,
                f"follows {[_name(node) for node in calls]}; a layer that selects chunks calls each of "
                + (", ".join(self.operators) + " once before it"),
            )
        for node, roles in zip(calls, _POOLS, strict=True):
            for role in roles:
                if _source(_argument(node, role)) != pools[role]:
                    return node, f"does not take {role} of the owner whose cache is read next"
        select, update, write = calls
        chosen = (_argument(select, "max_selected"), _argument(write, "chunk_size"))
        if chosen != (self.max_selected, self.chunk_size):
            return select, f"selects {chosen[0]} chunks of {chosen[1]} tokens, not what the KV policy says"
        links = (
            (select, "q", _argument(attention, "q")),
            (select, "query_start", _argument(attention, "query_start")),
            (update, "selected", select),
            (write, "slot", _argument(update, "slot")),
            (write, "shadow_table", _argument(select, "table")),
            (write, "page_table", _argument(attention, "page_table")),
        )
        for node, name, source in links:
            if _argument(node, name) is not source:
                return node, f"takes another {name} than the layer's own"
        for index, name in enumerate(("chunks", "places")):
            value = _argument(write, name)
            if not (isinstance(value, Node) and value.args == (update, index)):
                return write, f"takes other {name} than {update.name} gives"
        return None


def _name(node: Node) -> str:
    return str(node.target._schema.name)  # type: ignore[union-attr]


def _argument(node: Node, name: str) -> object:
    """Return the argument ``name``; operators of a selection, and attention's first ones, have no defaults."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs[name]


def _source(value: object) -> str | None:
    """Return the name of the placeholder that ``value`` is, or is rows or a view of."""
    while isinstance(value, Node) and value.op != "placeholder":
        value = value.args[0] if value.args else None
    return value.name if isinstance(value, Node) else None
