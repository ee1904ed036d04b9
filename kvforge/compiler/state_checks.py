"""Checks on what an exported graph does to the states of layers with linear attention."""

from collections.abc import Sequence

from torch.fx import Node

from kvforge.common.graph_nodes import argument

CONVOLVE, RECUR = "kvforge::short_conv", "kvforge::gated_delta_rule"
_POOLS = {CONVOLVE: "conv_pool", RECUR: "state_pool"}
_ROWS = ("query_start", "state_read", "state_write")


def broken_state_rule(
    calls: Sequence[tuple[Node, str]], inputs: Sequence[str], num_layers: int, is_lower: bool
) -> tuple[Node | None, str] | None:
    """Return the node that breaks a rule (None: the graph as a whole) and the rule, None where all is well.

    ``calls`` are the graph's operators with their names, in order, ``inputs`` the names of its inputs. The last of the
    lower graph are two pools of each of ``num_layers`` layers, ``state_read`` and ``state_write``: in each layer the
    convolution and then the recurrence take its own pools, and all take the same rows. The last of the upper graph are
    S of each layer and ``survivor_state``, which the recurrence reads.
    """
    kinds, names = ((CONVOLVE, RECUR), _ROWS[1:]) if is_lower else ((RECUR,), _ROWS[1:2])
    end, count = len(inputs) - len(names), len(kinds) * num_layers
    found = [(node, name) for node, name in calls if name in _POOLS]
    if len(found) != count:
        return None, f"has {len(found)} operators on states; the model asks for {count}"
    rows: dict[str, set[str]] = {name: set() for name in _ROWS}
    for index, (node, name) in enumerate(found):
        wanted, own = kinds[index % len(kinds)], inputs[end - count + index]
        pool = argument(node, _POOLS[name])
        if name != wanted or not isinstance(pool, Node) or pool.name != own:
            return node, f"calls {name} on another pool than {wanted} of the layer must have, {own}"
        for row, taken in rows.items():
            value = argument(node, row)
            taken.add(value.name if isinstance(value, Node) else "")
    if found and [rows[name] for name in names] != [{name} for name in inputs[end:]]:
        return None, f"takes {rows} as rows of states; they must be {list(inputs[end:])} in every layer"
    if found and is_lower and len(rows[_ROWS[0]]) != 1:
        return None, "takes sequences of states to begin in several ways"
    return None
