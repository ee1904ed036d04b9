"""The ONNX nodes of all operators."""

from plugins.onnx_node import OnnxNode
from plugins.registry import backend_modules

NODES_OF: dict[str, tuple[OnnxNode, ...]] = {name: module.NODES for name, module in backend_modules("onnx").items()}
"""The nodes that do what an operator does, by the operator's name."""

ONNX_NODES: dict[str, OnnxNode] = {node.name: node for nodes in NODES_OF.values() for node in nodes}
"""Every node by its own name."""


def forms_of(operator: str) -> list[list[OnnxNode]]:
    """The steps of an operator in order, each with its forms: nodes with the same first input, one of which is made."""
    found: dict[str, list[OnnxNode]] = {}
    for node in NODES_OF[operator]:
        found.setdefault(node.inputs[0], []).append(node)
    return list(found.values())


def calls() -> dict[str, list[OnnxNode]]:
    """The nodes that a call becomes, by the name of the torch operator that is called."""
    found: dict[str, list[OnnxNode]] = {}
    for name, nodes in NODES_OF.items():
        for node in nodes:
            if node.calls is not None or all(one.inputs[0] == node.inputs[0] for one in nodes):
                found.setdefault(node.calls or name, []).append(node)
    return found
