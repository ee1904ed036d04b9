"""Checks on what an exported graph does to the states of layers that keep one."""

from collections.abc import Sequence

from torch.fx import Node

from kvforge.common.graph_nodes import argument

_POOLS = {
    "kvforge::short_conv": "conv_pool",
    "kvforge::gated_delta_rule": "state_pool",
    "kvforge::mamba2_scan": "state_pool",
}
_ROWS = ("query_start", "state_read", "state_write")


def broken_state_rule(
    calls: Sequence[tuple[Node, str]], inputs: Sequence[str], operators: Sequence[str], num_rows: int
) -> tuple[Node | None, str] | None:
    """Return the node that breaks a rule (None: the graph as a whole) and the rule, None where all is well.

    ``calls`` are the graph's operators with their names, in order, ``inputs`` the names of its inputs, of which the
    last are the pools of the ``operators`` on states and ``num_rows`` that say which rows: of the lower graph
    ``state_read`` and ``state_write``, of the upper one ``survivor_state``, which is read. Each of these operators
    takes its own pool, and all take the same rows.
    """
    names, end, count = _ROWS[1 : 1 + num_rows], len(inputs) - num_rows, len(operators)
    found = [(node, name) for node, name in calls if name in _POOLS]
    if len(found) != count:
        return None, f"has {len(found)} operators on states; the model asks for {count}"
    rows: dict[str, set[str]] = {name: set() for name in _ROWS}
    for index, (node, name) in enumerate(found):
        wanted, own = f"kvforge::{operators[index]}", inputs[end - count + index]
        pool = argument(node, _POOLS[name])
        if name != wanted or not isinstance(pool, Node) or pool.name != own:
            return node, f"calls {name} on another pool than {wanted} of the layer must have, {own}"
        for row, taken in rows.items():
            value = argument(node, row)
            taken.add(value.name if isinstance(value, Node) else "")
    if found and [rows[name] for name in names] != [{name} for name in inputs[end:]]:
        return None, f"takes {rows} as rows of states; they must be {list(inputs[end:])} in every layer"
    if found and num_rows > 1 and len(rows[_ROWS[0]]) != 1:
        return None, "takes sequences of states to begin in several ways"
    return None
