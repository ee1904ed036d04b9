"""Runs one ONNX operator with its function body in onnxruntime, on torch tensors of any supported dtype."""

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor

from plugins.onnx_body import DOMAIN, DOMAIN_VERSION, OPSET
from plugins.onnx_node import Cache
from plugins.onnx_operators import ONNX_OPERATORS

ELEMENT_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int32: TensorProto.INT32,
}
_DTYPES = {element: dtype for dtype, element in ELEMENT_TYPES.items()}
_IR_VERSION = 10
_OUTPUT_RANKS = {
    **dict.fromkeys(("k_pool_out", "v_pool_out"), 4),
    **dict.fromkeys(("k_scales_out", "v_scales_out", "attended", "keys", "scores", "selected"), 3),
    **dict.fromkeys(("accepted", "next_token"), 1),
}


def cache_of(dtype: torch.dtype) -> Cache:
    """Which kind of cache pools of ``dtype`` are."""
    return {torch.float8_e4m3fn: Cache.E4M3, torch.int8: Cache.INT8}.get(dtype, Cache.FLOAT)


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


def operator_model(
    name: str,
    inputs: tuple[tuple[torch.dtype, int], ...],
    attributes: Mapping[str, Any],
    output_types: Mapping[str, torch.dtype],
) -> onnx.ModelProto:
    """A model of one node; ``inputs`` are (dtype, rank) in the operator's order, every dimension dynamic."""
    operator = ONNX_OPERATORS[name]
    pools = [dtype for label, (dtype, _) in zip(operator.inputs, inputs, strict=True) if label == "k_pool"]
    function = operator.body(cache_of(pools[0]) if pools else Cache.FLOAT)
    graph = helper.make_graph(
        [operator.node(list(operator.inputs), list(operator.outputs), **attributes)],
        name,
        [
            helper.make_tensor_value_info(label, ELEMENT_TYPES[dtype], [f"{label}_{i}" for i in range(rank)])
            for label, (dtype, rank) in zip(operator.inputs, inputs, strict=True)
        ],
        [
            helper.make_tensor_value_info(label, ELEMENT_TYPES[output_types[label]], [None] * _OUTPUT_RANKS[label])
            for label in operator.outputs
        ],
    )
    model = helper.make_model(
        graph,
        functions=[function],
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=_IR_VERSION,
    )
    onnx.checker.check_model(model, full_check=True)
    return model


@cache
def _session(name: str, inputs: tuple, attributes: tuple, output_types: tuple) -> OnnxSession:
    return OnnxSession(operator_model(name, inputs, dict(attributes), dict(output_types)))


def run_operator(
    name: str, tensors: tuple[Tensor, ...], attributes: Mapping[str, Any], output_types: tuple[torch.dtype, ...]
) -> list[Tensor]:
    """Run operator ``name``; sessions are kept by dtypes, ranks and attributes."""
    operator = ONNX_OPERATORS[name]
    inputs = tuple((tensor.dtype, tensor.dim()) for tensor in tensors)
    types = tuple(zip(operator.outputs, output_types, strict=True))
    session = _session(name, inputs, tuple(attributes.items()), types)
    results = session.run(dict(zip(operator.inputs, tensors, strict=True)))
    return [results[label] for label in operator.outputs]
