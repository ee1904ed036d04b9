"""Checks on the network that TensorRT's parser made of a graph, layer by layer, before a plan is built of it.

What a plan computes can be seen on a GPU alone; what it was built of can be seen here: results, pools in place, weights
and products in the dtype that was asked for.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

from kvforge.common.errors import BuildError
from kvforge.compiler.convert import ROPE_TABLES
from kvforge.compiler.options import ResolvedOptions
from kvforge.tensorrt.api import trt
from kvforge.tensorrt.graph_tensors import (
    INPUTS,
    RESULTS,
    WRITTEN,
    operators_of,
    policy_inputs,
    role_of,
    written_roles,
)
from plugins.onnx_nodes import forms_of
from plugins.paged_attention.trt import ATTENTIONS
from plugins.trt_plugin import data_type

_MATRIX = 2
"""Dimensions from which on a constant is a weight of a product or a table."""


def check_network(network: trt.INetworkDefinition, graph: str, options: ResolvedOptions) -> None:
    """Check that the network has the graph's results and nothing else, returns each pool that the graph writes in the
    memory that it came in, has the KV policy's plugins with each attention, and has all weights and all products in the
    dtype of the engine.

    Raises:
        BuildError: naming the tensor or the layer that breaks a rule.
    """
    layers = _layers(network)
    producers = {layer.get_output(index).name: (layer, index) for layer in layers for index in range(layer.num_outputs)}
    of_step = INPUTS[graph] | policy_inputs(graph, options.policy)
    roles = written_roles(graph, options.kv_dtype, options.policy)
    pools = [name for name in _names(network.get_input, network.num_inputs) if name not in of_step]
    written = [name for name in pools if role_of(name) in roles]
    _check_results(network, graph, written)
    for pool in written:
        _check_in_place(graph, pool, producers)
    if graph in ("lower", "upper"):
        _check_policy(graph, layers, options)
    for layer in layers:
        _check_dtypes(graph, layer, options)


def weight_bytes(network: trt.INetworkDefinition) -> int:
    """Return the bytes of the network's weights and tables, without single numbers."""
    constants = [layer.get_output(0) for layer in _layers(network) if layer.type == trt.LayerType.CONSTANT]
    sizes = [(math.prod(tensor.shape), tensor.dtype.itemsize) for tensor in constants if _is_float(tensor)]
    return sum(count * itemsize for count, itemsize in sizes if count > 1)


def plugin_layers(network: trt.INetworkDefinition) -> list[str]:
    """Return the names of the layers that are plugins."""
    return [layer.name for layer in _layers(network) if layer.type == trt.LayerType.PLUGIN_V3]


def _layers(network: trt.INetworkDefinition) -> list[trt.ILayer]:
    return [network.get_layer(index) for index in range(network.num_layers)]


def _names(get: object, count: int) -> list[str]:
    return [get(index).name for index in range(count)]  # type: ignore[operator]


def _check_results(network: trt.INetworkDefinition, graph: str, written: list[str]) -> None:
    found = _names(network.get_output, network.num_outputs)
    expected = [*RESULTS[graph], *(f"{pool}{WRITTEN}" for pool in written)]
    for name in expected:
        if name not in found:
            _fail(graph, f"has no output {name}")
    for name in found:
        if name not in expected:
            _fail(graph, f"has an output {name}, which the runtime does not know")


def _check_in_place(graph: str, pool: str, producers: dict[str, tuple[trt.ILayer, int]]) -> None:
    """Follow ``<pool>_out`` back to the pool, through outputs of plugins that are their inputs."""
    name = f"{pool}{WRITTEN}"
    while name != pool:
        layer, index = producers.get(name, (None, 0))
        if layer is None or layer.type != trt.LayerType.PLUGIN_V3:
            _fail(graph, f"returns {pool}{WRITTEN} in other memory than {pool}: {name} is no plugin's output")
        source = _plugin(layer).get_aliased_input(index)
        if source < 0:
            where = f"returns {pool}{WRITTEN} in other memory than {pool}"
            _fail(graph, f"{where}: {layer.name} does not write it in place")
        name = layer.get_input(source).name


def _check_policy(graph: str, layers: list[trt.ILayer], options: ResolvedOptions) -> None:
    """Each attention has one plugin of each step of the KV policy's operators."""
    found = Counter(_plugin(layer).plugin_name for layer in layers if layer.type == trt.LayerType.PLUGIN_V3)
    attentions = sum(found[name] for name in ATTENTIONS)
    for operator in operators_of(options.policy):
        for forms in forms_of(operator):
            count = sum(found[node.name] for node in forms)
            if count != attentions:
                names = " or ".join(node.name for node in forms)
                _fail(graph, f"has {count} plugins {names} for {attentions} attentions")


def _check_dtypes(graph: str, layer: trt.ILayer, options: ResolvedOptions) -> None:
    asked = data_type(trt, options.torch_dtype)
    if layer.type == trt.LayerType.CONSTANT:
        tensor = layer.get_output(0)
        is_weight = len(tensor.shape) >= _MATRIX and layer.name not in ROPE_TABLES
        if is_weight and _is_float(tensor) and tensor.dtype != asked:
            _fail(graph, f"has the weight {layer.name} in {tensor.dtype.name}, not in {asked.name}")
    if layer.type in (trt.LayerType.MATRIX_MULTIPLY, trt.LayerType.EINSUM):
        for tensor in _inputs(layer):
            if tensor.dtype != asked:
                _fail(graph, f"multiplies {tensor.name} in {layer.name} in {tensor.dtype.name}, not in {asked.name}")


def _inputs(layer: trt.ILayer) -> Iterator[trt.ITensor]:
    return (tensor for index in range(layer.num_inputs) if (tensor := layer.get_input(index)) is not None)


def _is_float(tensor: trt.ITensor) -> bool:
    return tensor.dtype in (trt.DataType.FLOAT, trt.DataType.HALF, trt.DataType.BF16, trt.DataType.FP8)


def _plugin(layer: Any) -> Any:
    """The IPluginV3 that a plugin's layer holds: layers come as what they all are."""
    layer.__class__ = trt.IPluginV3Layer
    return getattr(layer, "plugin")  # noqa: B009 (of this class alone)


def _fail(graph: str, what: str) -> NoReturn:
    raise BuildError(f"The network of {graph} {what}; the plan would be wrong and is not built.")
