"""Runs ONNX nodes with their function bodies in onnxruntime, on torch tensors of any supported dtype."""

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor

import plugins
from plugins.kv_quantization import INT4
from plugins.onnx_body import DOMAIN, DOMAIN_VERSION, OPSET
from plugins.onnx_node import Cache, matching
from plugins.onnx_nodes import ONNX_NODES, forms_of
from tests.support.operators.cases import reference

ELEMENT_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}
_DTYPES = {element: dtype for dtype, element in ELEMENT_TYPES.items()}
_IR_VERSION = 10


def cache_of(dtype: torch.dtype) -> Cache:
    """Which kind of cache pools of ``dtype`` are."""
    kinds = {torch.float8_e4m3fn: Cache.E4M3, torch.int8: Cache.INT8, INT4: Cache.INT4}
    return kinds.get(dtype, Cache.FLOAT)


def ort_value(tensor: Tensor) -> onnxruntime.OrtValue:
    """The tensor as onnxruntime takes it; dtypes that numpy lacks travel as their bits."""
    tensor = tensor.contiguous()
    bits = {2: torch.uint16, 1: torch.uint8}.get(tensor.element_size(), tensor.dtype)
    array = tensor.view(bits).numpy() if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor.numpy()
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENT_TYPES[tensor.dtype])


def torch_tensor(value: onnxruntime.OrtValue) -> Tensor:
    """A copy of an onnxruntime result."""
    dtype, shape = _DTYPES[value.element_type()], value.shape()
    result = torch.empty(shape, dtype=dtype)
    if result.numel():
        ctypes.memmove(result.data_ptr(), value.data_ptr(), result.nbytes)
    return result


class OnnxSession:
    """An onnxruntime session that takes and gives torch tensors."""

    def __init__(self, model: onnx.ModelProto | str) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        source = model if isinstance(model, str) else model.SerializeToString()
        self.session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def run(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run with the inputs that the graph has; returns every output by name."""
        values = {name: ort_value(feeds[name]) for name in self.inputs}
        results = self.session.run_with_ort_values(self.outputs, values)
        return {name: torch_tensor(value) for name, value in zip(self.outputs, results, strict=True)}


Kinds = tuple[tuple[str, torch.dtype, int], ...]
"""Names of values with their dtypes and ranks."""


def nodes_model(names: tuple[str, ...], attributes: tuple, inputs: Kinds, outputs: Kinds) -> onnx.ModelProto:
    """A model of nodes, each of which may take what those before it give; every dimension is dynamic."""
    nodes = [ONNX_NODES[name] for name in names]
    pools = [dtype for name, dtype, _ in inputs if name == "k_pool"]
    cache = cache_of(pools[0]) if pools else Cache.FLOAT
    numbers = dict(attributes)

    def values(kinds: Kinds) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], [f"{name}_{i}" for i in range(rank)])
            for name, dtype, rank in kinds
        ]

    graph = helper.make_graph(
        [
            node.node(list(node.inputs), list(node.outputs), **{name: numbers[name] for name, _ in node.attributes})
            for node in nodes
        ],
        names[-1],
        values(inputs),
        values(outputs),
    )
    model = helper.make_model(
        graph,
        functions=[node.body(cache) for node in nodes],
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=_IR_VERSION,
    )
    onnx.checker.check_model(model, full_check=True)
    return model


@cache
def _session(names: tuple[str, ...], attributes: tuple, inputs: Kinds, outputs: Kinds) -> OnnxSession:
    return OnnxSession(nodes_model(names, attributes, inputs, outputs))


def run_node_chain(
    names: tuple[str, ...], given: Mapping[str, Any], attributes: Mapping[str, Any], like: list[Tensor]
) -> list[Tensor]:
    """Run these nodes on the tensors in ``given``; the last one's results have the dtypes and ranks of ``like``.
    Sessions are kept by dtypes, ranks and attributes."""
    nodes = [ONNX_NODES[name] for name in names]
    taken = dict.fromkeys(name for node in nodes for name in node.inputs if name in given)
    inputs = tuple((name, given[name].dtype, given[name].dim()) for name in taken)
    outputs = tuple((name, x.dtype, x.dim()) for name, x in zip(nodes[-1].outputs, like, strict=True))
    results = _session(names, tuple(attributes.items()), inputs, outputs).run(given)
    return [results[name] for name in nodes[-1].outputs]


def run_nodes(name: str, args: tuple) -> list[Tensor]:
    """Run the nodes that are an operator, on the operator's arguments."""
    given = plugins.OPERATORS[name].bind(*args)
    chain, known = [], dict(given)
    for nodes in forms_of(name):
        chain.append(matching(nodes, known))
        known |= dict.fromkeys(chain[-1].outputs, True)
    attributes = {label: given[label] for node in chain for label, _ in node.attributes if label in given}
    attributes |= {key: given[tensor].shape[dim] for node in chain for key, (tensor, dim) in node.sizes.items()}
    return run_node_chain(tuple(node.name for node in chain), given, attributes, reference(name, args))
