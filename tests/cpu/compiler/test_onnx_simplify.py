"""Graphs as torch writes them, simplified: as onnxscript's optimizer does it, and what the process keeps of it."""

import onnx_ir as ir
import onnxscript.optimizer
import pytest
import torch
from torch.export import Dim
from torch.onnx._internal.exporter._registration import ONNXRegistry

from kvforge.compiler.onnx_registry import registry_kept
from kvforge.compiler.onnx_simplify import simplify
from plugins.onnx_body import OPSET

FILL = vars(ONNXRegistry)["from_torchlib"]


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).tensor_split((4, 8), dim=-1)
        mixed = q.unflatten(-1, (2, 2)) * k.unflatten(-1, (2, 2)) + v.unflatten(-1, (2, 2)).float().square()
        return mixed.reshape(x.shape[0] * 2, 2).reshape(x.shape[0], 4).to(torch.float32) + torch.arange(4) * 2


def exported() -> ir.Model:
    torch.manual_seed(0)
    program = torch.onnx.export(
        Heads().eval(),
        (torch.ones(3, 8),),
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        dynamic_shapes=({0: Dim("n")},),
    )
    assert program is not None
    return ir.serde.deserialize_model(program.model_proto)


def nodes_of(model: ir.Model) -> list[tuple[str, list[str | None], list[str]]]:
    """Operators, names of inputs, and outputs with their types and shapes."""
    return [(node.op_type, [i and i.name for i in node.inputs], [str(o) for o in node.outputs]) for node in model.graph]


def test_nodes_are_those_of_onnxscripts_optimizer() -> None:
    model, optimized = exported(), exported()
    before = len(model.graph)
    simplify(model)
    onnxscript.optimizer.optimize_ir(optimized)
    assert nodes_of(model) == nodes_of(optimized) and len(model.graph) < before
    assert all(output.dtype is not None for node in model.graph for output in node.outputs)
    assert model.graph.initializers.keys() == optimized.graph.initializers.keys()
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        assert (value.const_value.numpy() == optimized.graph.initializers[name].const_value.numpy()).all()


def test_each_graph_has_a_registry_of_its_own() -> None:
    with registry_kept():
        first, second = (ONNXRegistry.from_torchlib(opset_version=OPSET) for _ in range(2))
    first.register_op(torch.ops.aten.silu.default, lambda x: x, is_complex=False)
    with registry_kept():
        third = ONNXRegistry.from_torchlib(opset_version=OPSET)
    known = ONNXRegistry.from_torchlib(opset_version=OPSET)
    name = torch.ops.aten.silu.default.name()
    makers = len(known.functions[name])
    assert [len(each.functions[name]) for each in (first, second, third)] == [makers + 1, makers, makers]
    assert second.functions.keys() == known.functions.keys() and second.opset_version == known.opset_version


def test_a_registry_of_torchs_own_opset() -> None:
    with registry_kept():
        copied = ONNXRegistry.from_torchlib()
    assert copied.opset_version == ONNXRegistry.from_torchlib().opset_version


def test_torch_is_as_before() -> None:
    with pytest.raises(ValueError, match="in between"), registry_kept():
        raise ValueError("in between")
    assert vars(ONNXRegistry)["from_torchlib"] is FILL
