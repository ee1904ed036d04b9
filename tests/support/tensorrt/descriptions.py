"""What plugins of TensorRT for RTX say of themselves: asked by its parser, of networks of one node each."""

import ctypes
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import onnx
import torch
from onnx import TensorProto, helper

from plugins.trt_case import Dynamic, NetworkTensor
from plugins.trt_plugin import DATA_TYPES, NAMESPACE, data_type, torch_dtype
from plugins.trt_plugins import PLUGINS, register_rtx_plugins
from plugins.trt_target import compile_for

ELEMENT_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
    torch.int8: TensorProto.INT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}


def as_json(plugin: str, inputs: tuple[NetworkTensor, ...], attributes: dict[str, float | int]) -> dict[str, Any]:
    """A case as a question: a dimension that differs from step to step is a list of its size in this step."""
    shapes = [[[size] if isinstance(size, Dynamic) else size for size in tensor.shape] for tensor in inputs]
    return {
        "plugin": plugin,
        "inputs": [[dtype_name(t.dtype), shape] for t, shape in zip(inputs, shapes, strict=True)],
        "attributes": attributes,
    }


def answer(trt: ModuleType, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `ask_rtx` asks: a description of each case, compiled for capability 9.0."""
    register_rtx_plugins()
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    with compile_for(90):
        return [_describe(trt, builder, case) for case in cases]


def _describe(trt: ModuleType, builder: Any, case: dict[str, Any]) -> dict[str, Any]:
    from plugins.trt_v3 import kernels_of

    inputs = [(getattr(torch, name), shape) for name, shape in case["inputs"]]
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, builder.logger)
    assert parser.parse(one_node(case, inputs, dynamic=False).SerializeToString()), [
        str(parser.get_error(index)) for index in range(parser.num_errors)
    ]
    (layer,) = (network.get_layer(index) for index in range(network.num_layers))
    layer.__class__ = trt.IPluginV3Layer
    plugin, creator = layer.plugin, trt.get_plugin_registry().get_creator(case["plugin"], "1", NAMESPACE)
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    plugin.configure_plugin([_described(trt, *tensor) for tensor in inputs], [])
    (launch,) = kernels_of(plugin)
    sizes = launch.sizes_of([step(shape) for _, shape in inputs])
    return {
        "fields": [field.name for field in creator.field_names],
        "attributes": plugin.attributes,
        "outputs": [[dtype_name(torch_dtype(tensor.dtype)), list(tensor.shape)] for tensor in outputs],
        "aliases": [plugin.get_aliased_input(index) for index in range(len(outputs))],
        "combinations": sorted(_combinations(trt, plugin, len(inputs), len(inputs) + len(outputs))),
        "grid": list(launch.grid_of(sizes)),
        "threads": launch.num_threads,
        "shared_bytes": launch.shared_bytes,
        "extra": sizes,
        "entry": launch.entry,
        "ptx": launch.ptx,
        "started": _started(trt, creator, plugin, [step(shape) for _, shape in inputs]),
    }


def _started(trt: ModuleType, creator: Any, plugin: Any, shapes: list[list[int]]) -> list[Any]:
    """What the plugin of a plan starts in a step: grid, arguments and stream, where inputs and outputs lie at 1, 2, …;
    the plan is what the plugin has serialized."""
    from plugins import trt_v3

    again = creator.create_plugin(plugin.plugin_name, plugin.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    assert again.kernels == trt_v3.kernels_of(plugin) and again.attributes == plugin.attributes
    described = [trt.PluginTensorDesc() for _ in shapes]
    for each, shape in zip(described, shapes, strict=True):
        each.dims = trt.Dims(shape)
    started: list[Any] = []
    kernel = SimpleNamespace(start=lambda grid, arguments, stream: started.extend([list(grid), arguments, stream]))
    inputs, outputs = range(1, len(shapes) + 1), range(len(shapes) + 1, len(shapes) + 1 + plugin.num_outputs)
    with (
        mock.patch.object(trt_v3, "_loaded", lambda launch, device: kernel),
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch.cuda.get_device_capability", lambda device: (9, 0)),
    ):
        again.clone().enqueue(described, [], list(inputs), list(outputs), 0, 77)
    if started:
        started[1] = [["at", each.value] if isinstance(each, ctypes.c_void_p) else each for each in started[1]]
    return started


def one_node(case: dict[str, Any], inputs: list[tuple[torch.dtype, list[Any]]], dynamic: bool) -> onnx.ModelProto:
    """A model of the plugin alone; what differs from step to step has its size in this step unless it is `dynamic`."""
    definition = PLUGINS[case["plugin"]]
    outputs = [f"output_{index}" for index in range(definition.num_outputs)]
    node = helper.make_node(
        definition.name,
        list(definition.inputs),
        outputs,
        domain=NAMESPACE,
        plugin_namespace=NAMESPACE,
        plugin_version="1",
        **case["attributes"],
    )
    given = [
        helper.make_tensor_value_info(
            name,
            ELEMENT_TYPES[dtype],
            [f"{name}_{dim}" if isinstance(n, list) else n for dim, n in enumerate(shape)] if dynamic else step(shape),
        )
        for name, (dtype, shape) in zip(definition.inputs, inputs, strict=True)
    ]
    types = tuple(dtype for dtype, _ in inputs)
    (promised,) = (found[len(types) :] for found in definition.types if found[: len(types)] == types)
    results = [
        helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], None)
        for name, dtype in zip(outputs, promised, strict=True)
    ]
    graph = helper.make_graph([node], "case", given, results)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(NAMESPACE, 1)], ir_version=10
    )


def _combinations(trt: ModuleType, plugin: Any, num_inputs: int, count: int) -> Iterator[list[str]]:
    """All dtypes that the plugin takes together, found by asking position after position."""
    begun: list[list[torch.dtype]] = [[]]
    for position in range(count):
        begun = [
            [*types, dtype]
            for types in begun
            for dtype in DATA_TYPES
            if plugin.supports_format_combination(
                position, [_described(trt, each, [1]) for each in (*types, dtype)], num_inputs
            )
        ]
    return ([dtype_name(dtype) for dtype in types] for types in begun)


def _described(trt: ModuleType, dtype: torch.dtype, shape: list[Any]) -> Any:
    described = trt.DynamicPluginTensorDesc()
    described.desc.type = data_type(trt, dtype)
    described.desc.format = trt.TensorFormat.LINEAR
    described.desc.dims = trt.Dims([-1 if isinstance(size, list) else size for size in shape])
    return described


def step(shape: list[Any]) -> list[int]:
    """The sizes in this step."""
    return [size[0] if isinstance(size, list) else size for size in shape]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
