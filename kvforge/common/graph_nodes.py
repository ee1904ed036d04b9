"""Looking at the operator calls of an exported graph."""

from torch.fx import Node


def name_of(node: Node) -> str:
    """Return the name of the operator that ``node`` calls."""
    return str(node.target._schema.name)  # type: ignore[union-attr]


def argument(node: Node, name: str) -> object:
    """Return the argument ``name`` of a call, its default where it is left out."""
    for position, one in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if one.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, one.default_value)
    raise AssertionError(f"{node.target} has no argument {name}")


def source_of(value: object) -> str | None:
    """Return the name of the placeholder that ``value`` is, or is rows or a view of."""
    while isinstance(value, Node) and value.op != "placeholder":
        value = value.args[0] if value.args else None
    return value.name if isinstance(value, Node) else None


def takes_columns(attention: Node, role: str) -> bool:
    """Whether the argument ``role`` of an attention is a view of a pool with a single KV head."""
    view = argument(attention, role)
    return isinstance(view, Node) and view.op != "placeholder" and view.meta["val"].shape[2] == 1
