"""How an exported graph's calls of our operators become ONNX nodes of the domain ``kvforge``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnxscript.values import Op, Opset

from plugins.onnx_body import DOMAIN, DOMAIN_VERSION
from plugins.onnx_node import PLUGIN_ATTRIBUTES, OnnxNode, matching
from plugins.onnx_nodes import calls

_OpSchema = onnx.defs.OpSchema
_ATTRIBUTE_TYPES = {float: _OpSchema.AttrType.FLOAT, int: _OpSchema.AttrType.INT, str: _OpSchema.AttrType.STRING}
_TENSORS = [
    f"tensor({name})" for name in ("float", "float16", "bfloat16", "float8e4m3fn", "int8", "uint8", "int32", "int64")
]

Translations = dict[Callable[..., Any], Callable[..., Any]]


def _node_maker(node: OnnxNode) -> Callable[..., Any]:
    """Return what makes this node while torch exports, given its inputs and attributes by name."""
    attributes = [*node.attributes, *((attribute, str) for attribute in PLUGIN_ATTRIBUTES)]
    schema = _OpSchema(
        node.name,
        DOMAIN,
        DOMAIN_VERSION,
        inputs=[_OpSchema.FormalParameter(parameter, f"T_{parameter}") for parameter in node.inputs],
        outputs=[_OpSchema.FormalParameter(parameter, f"T_{parameter}") for parameter in node.outputs],
        type_constraints=[(f"T_{parameter}", _TENSORS, "") for parameter in (*node.inputs, *node.outputs)],
        attributes=[_OpSchema.Attribute(attribute, _ATTRIBUTE_TYPES[kind]) for attribute, kind in attributes],
    )
    op = Op(Opset(DOMAIN, DOMAIN_VERSION), node.name, schema)

    def make(given: Mapping[str, Any]) -> Any:
        numbers = {label: kind(given[label]) for label, kind in node.attributes}
        return op(*(given[label] for label in node.inputs), **numbers, **PLUGIN_ATTRIBUTES)

    return make


def _translation(overload: torch._ops.OpOverload, nodes: Sequence[OnnxNode]) -> Callable[..., Any]:
    """Return what makes the node for a call of ``overload``."""
    makers = {node.name: _node_maker(node) for node in nodes}
    arguments = overload._schema.arguments

    def translate(*values: Any, **more: Any) -> Any:
        given = {a.name: a.default_value for a in arguments}
        given |= dict(zip(given, values, strict=False)) | more
        return makers[matching(nodes, given).name](given)

    return translate


def translations() -> Translations:
    """Return the table for ``torch.onnx.export``: operator overload to what makes its node."""
    overloads = {getattr(torch.ops.kvforge, name).default: nodes for name, nodes in calls().items()}
    return {overload: _translation(overload, nodes) for overload, nodes in overloads.items()}
