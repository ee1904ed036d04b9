"""Split-KV decode in a TensorRT network: each PagedAttention node becomes two, because a plugin is one kernel.

The first computes partial results of sequences with one query, over parts of their keys in parallel; the second merges
these and does all other sequences (Flash-Decoding; the kernels are beside this file).
"""

from collections.abc import Callable

from onnx import ModelProto, NodeProto, helper

from plugins.onnx_body import DOMAIN

_NODES = ("PagedAttention", "PagedAttentionDynamic")
_FIRST_POOL_OF_WRITER = {"RopePagedKvWrite": 5, "RopePagedKvWriteDynamic": 5, "SelectedKvPlace": 7}
_K_POOL_OF_ATTENTION = 1


def split_decode(model: ModelProto, num_splits: Callable[[int], int]) -> int:
    """Replace every PagedAttention node of ``model``, in place, and return how many there were.

    ``num_splits`` maps the number of KV heads to the most parts of a sequence's keys. The model-local functions of the
    operators are dropped where no node calls them any more: the new nodes exist as TensorRT plugins only.
    Raises ValueError for a node whose pool is no input of the graph.
    """
    graph = model.graph
    nodes = list(graph.node)
    producers = {name: node for node in nodes for name in node.output}
    kv_heads = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    replaced: list[NodeProto] = []
    count = 0
    for node in nodes:
        if node.domain != DOMAIN or node.op_type not in _NODES:
            replaced.append(node)
            continue
        pool = _graph_input(node.input[_K_POOL_OF_ATTENTION], producers)
        if pool not in kv_heads or len(kv_heads[pool]) != 4:
            raise ValueError(f"{node.name or node.op_type}: {node.input[_K_POOL_OF_ATTENTION]} is no pool of the graph")
        replaced += _chain(node, num_splits(kv_heads[pool][2].dim_value))
        count += 1
    del graph.node[:]
    graph.node.extend(replaced)
    kept = [f for f in model.functions if f.domain != DOMAIN or f.name not in _NODES]
    del model.functions[:]
    model.functions.extend(kept)
    return count


def _graph_input(name: str, producers: dict[str, NodeProto]) -> str:
    """The pool that ``name`` is after any number of writes in place."""
    while name in producers and producers[name].op_type in _FIRST_POOL_OF_WRITER:
        node = producers[name]
        name = node.input[_FIRST_POOL_OF_WRITER[node.op_type] + list(node.output).index(name)]
    return name


def _chain(node: NodeProto, num_splits: int) -> list[NodeProto]:
    suffix = node.op_type.removeprefix("PagedAttention")
    partial_name = f"{node.output[0]}_partial"
    nodes = []
    for part, inputs, output in (
        ("Partial", list(node.input), partial_name),
        ("Combine", [*node.input, partial_name], node.output[0]),
    ):
        made = helper.make_node(
            f"PagedAttention{part}{suffix}", inputs, [output], name=f"{node.name}_{part.lower()}", domain=DOMAIN
        )
        made.attribute.extend(node.attribute)
        made.attribute.append(helper.make_attribute("num_splits", num_splits))
        nodes.append(made)
    return nodes
