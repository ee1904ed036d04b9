"""Operators for which torch has no ONNX, rewritten node by node: the graph is the one that torch's own way gives."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.onnx._internal.exporter import _fx_passes

from kvforge.compiler import onnx_decompose
from kvforge.compiler.onnx_decompose import decomposed_by_node
from kvforge.compiler.onnx_simplify import simplify
from plugins.onnx_body import OPSET
from tests.support.tensorrt.claims import EVERYTHING
from tests.support.tensorrt.exports import export

TORCHS: Any = _fx_passes.decompose_with_registry
ROWS = ({0: Dim.DYNAMIC},)


class Rewritten(torch.nn.Module):
    """Each operator that is rewritten, and conversions to the type that is there, in between and last."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.tensor_split((4, 8), dim=-1)
        low, high = v.float().chunk(2, dim=-1)
        mixed = q.unflatten(-1, (2, 2)) * k.view_as(q).unflatten(-1, (2, 2)).to(torch.float32)
        parts = x.chunk(3, dim=-1)
        return mixed.flatten(1).square() + v.half().float(), torch.cat([high, low], -1).half(), parts[2].float()


class ForTorch(torch.nn.Module):
    """Operators and sizes that are left to torch."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.reshape(x.shape[0] * 2, 6).square(), x.unflatten(0, (-1, 1)).flatten(1)


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """The programs that torch is asked to decompose."""
    asked: list[Any] = []

    def ask(program: Any, registry: Any) -> Any:
        asked.append(program)
        return TORCHS(program, registry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_decompose, "_TORCHS", ask)
        yield asked


def exported(module: torch.nn.Module, *, by_node: bool) -> list[Any]:
    """Nodes of the simplified graph, their values by number: names are the only thing that may differ."""
    with decomposed_by_node() if by_node else contextlib.nullcontext():
        program = torch.onnx.export(
            module.eval(),
            (torch.arange(36.0).view(3, 12),),
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            dynamic_shapes=ROWS,
            verbose=False,
        )
    assert program is not None
    simplify(program.model)
    graph = program.model.graph
    known: dict[ir.Value | None, Any] = {value: f"input {index}" for index, value in enumerate(graph.inputs)}
    for value in graph.initializers.values():
        assert value.const_value is not None
        known[value] = (value.dtype, value.const_value.numpy().tolist())
    nodes: list[Any] = []
    for node in graph:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        attributes.pop("allowzero", None)  # of Reshape; no shape here has a 0
        nodes.append((node.op_type, attributes, [known[value] for value in node.inputs]))
        for value in node.outputs:
            known[value] = (len(nodes), value.index(), value.dtype, [str(size) for size in value.shape or ()])
    return [*nodes, [known[value] for value in graph.outputs]]


@pytest.mark.parametrize(("module", "asks"), [(Rewritten(), 0), (ForTorch(), 1)])
def test_the_graph_is_torchs(module: torch.nn.Module, asks: int) -> None:
    with counted() as asked:
        found = exported(module, by_node=True)
    assert len(asked) == asks and found == exported(module, by_node=False)
    assert len(found) > 3


def test_a_models_graphs_are_not_traced_again(tmp_path: Path) -> None:
    graphs = EVERYTHING.options.graphs
    with counted() as asked:
        export(EVERYTHING, tmp_path, graphs)
    assert {file.stem for file in tmp_path.glob("*.onnx")} == set(graphs) and not asked


def test_torch_is_as_before() -> None:
    with pytest.raises(ValueError, match="in between"), decomposed_by_node():
        raise ValueError("in between")
    assert _fx_passes.decompose_with_registry is TORCHS
