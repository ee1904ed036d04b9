"""Checks on what an exported graph does to the states of layers that keep one."""

from collections.abc import Sequence

from torch.fx import Node

from kvforge.common.graph_nodes import argument

_POOLS = {"kvforge::short_conv": "conv_pool", "kvforge::gated_delta_rule": "state_pool"}
_ROWS = ("query_start", "state_read", "state_write")


def broken_state_rule(
    calls: Sequence[tuple[Node, str]], inputs: Sequence[str], operators: Sequence[str]
) -> tuple[Node | None, str] | None:
    """Return the node that breaks a rule (None: the graph as a whole) and the rule, None where all is well.

    ``calls`` are the graph's operators with their names, in order, ``inputs`` the names of its inputs, of which the
    last are the pools of the ``operators`` on states, ``state_read`` and ``state_write``. Each of these takes its own
    pool, and all take the same rows.
    """
    end = len(inputs) - 2
    pools = list(inputs[end - len(operators) : end]) if operators else []
    rows: dict[str, set[str]] = {name: set() for name in _ROWS}
    found = [(node, name) for node, name in calls if name in _POOLS]
    if len(found) != len(pools):
        return None, f"has {len(found)} operators on states; the model asks for {len(pools)}"
    for index, (node, name) in enumerate(found):
        wanted = f"kvforge::{operators[index]}"
        pool = argument(node, _POOLS[name])
        if name != wanted or not isinstance(pool, Node) or pool.name != pools[index]:
            return node, f"calls {name} on another pool than {wanted} of the layer must have, {pools[index]}"
        for row, names in rows.items():
            value = argument(node, row)
            names.add(value.name if isinstance(value, Node) else "")
    if pools and [rows[name] for name in _ROWS[1:]] != [{name} for name in inputs[end:]]:
        return None, f"takes {rows} as rows of states; they must be {list(inputs[end:])} in every layer"
    if pools and len(rows[_ROWS[0]]) != 1:
        return None, "takes sequences of states to begin in several ways"
    return None
