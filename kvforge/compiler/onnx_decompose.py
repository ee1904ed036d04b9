"""Writing operators of an exported graph for which torch has no ONNX as operators for which it has, node by node."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._decomp import get_onnx_implemented_overloads
from torch.onnx._internal.exporter._registration import ONNXRegistry

_ATEN = torch.ops.aten
_TORCHS: Any = _fx_passes.decompose_with_registry
Rewrite = Callable[[], None]


@contextlib.contextmanager
def decomposed_by_node() -> Iterator[None]:
    """Inside, ``torch.onnx.export`` decomposes graphs as ``decompose`` does."""
    _fx_passes.decompose_with_registry = decompose
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = _TORCHS


def decompose(program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
    """Change ``program``, so that every operator has an entry in ``registry``, and return it.

    torch's own traces the graph twice more, which is half of an export. It is asked where there is a node that neither
    has an entry nor is rewritten here; then a new program is returned.
    """
    graph = program.graph
    rewritten = [(node, rule(node)) for node in graph.nodes if (rule := _RULES.get(node.target))]
    others = (node for node in graph.nodes if node.op not in ("placeholder", "output") and not _RULES.get(node.target))
    known = set(get_onnx_implemented_overloads(registry))
    if not all(rewrite for _, rewrite in rewritten) or not all(_stays(node, known) for node in others):
        return _TORCHS(program, registry)
    for _, rewrite in rewritten:
        assert rewrite is not None
        rewrite()
    program.graph_module.recompile()
    return program


def _stays(node: fx.Node, known: set[Any]) -> bool:
    """Whether torch's decomposition leaves the node as it is, where ``known`` are the operators with ONNX."""
    called = node.target
    if called in (operator.getitem, _ATEN._assert_tensor_metadata.default):  # the exporter drops the second
        return True
    if not isinstance(called, torch._ops.OpOverload) or called not in known or called._schema.is_mutable:
        return False
    return not _is_cia_op(called) or _is_preservable_cia_op(called)


def _become(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
    """The node computes the same with another operator, under its name."""
    node.target, node.args, node.kwargs = target, args, kwargs


def _to_dtype(node: fx.Node) -> Rewrite | None:
    if len(node.args) != 2 or node.kwargs:
        return None
    is_result = any(user.op == "output" for user in node.users)  # the program's signature has its name
    if is_result or _value(node.args[0]).dtype != node.args[1]:
        return lambda: _become(node, _ATEN._to_copy.default, node.args[0], dtype=node.args[1])

    def leave_out() -> None:
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)

    return leave_out


def _square(node: fx.Node) -> Rewrite | None:
    return lambda: _become(node, _ATEN.pow.Tensor_Scalar, node.args[0], 2)


def _view(node: fx.Node) -> Rewrite | None:
    """Of what gives another shape, where at most one dimension of it is dynamic."""
    shape = [-1 if isinstance(size, SymInt) else size for size in _value(node).shape]
    if shape.count(-1) > 1:
        return None
    return lambda: _become(node, _ATEN.view.default, node.args[0], shape)


def _chunk(node: fx.Node) -> Rewrite | None:
    if node.kwargs:
        return None
    source, count, dim = (*node.args, 0)[:3]
    size = _value(source).shape[dim]
    if isinstance(size, SymInt):
        return None
    return lambda: _become(node, _ATEN.split.Tensor, node.args[0], -(-size // count), dim)


def _tensor_split(node: fx.Node) -> Rewrite | None:
    if node.kwargs:
        return None
    source, indices, dim = (*node.args, 0)[:3]
    size = _value(source).shape[dim]
    if isinstance(size, SymInt):
        return None
    bounds, dim = [0, *indices, size], dim % _value(source).dim()

    def rewrite() -> None:
        for part in list(node.users):  # each takes one of the results
            begin, end = bounds[part.args[1] : part.args[1] + 2]
            _become(part, _ATEN.slice.Tensor, node.args[0], dim, begin, end)
        node.graph.erase_node(node)

    return rewrite


def _value(node: Any) -> Tensor:
    return node.meta["val"]


_RULES: dict[Any, Callable[[fx.Node], Rewrite | None]] = {
    _ATEN.to.dtype: _to_dtype,
    _ATEN.square.default: _square,
    _ATEN.flatten.using_ints: _view,
    _ATEN.unflatten.int: _view,
    _ATEN.view_as.default: _view,
    _ATEN.chunk.default: _chunk,
    _ATEN.tensor_split.indices: _tensor_split,
}
"""What changes a node, by its operator; None of a node that torch is to decompose."""
