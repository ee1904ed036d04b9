"""Plugins of TensorRT 11 around the operators' Triton kernels: the kernel's PTX goes into the plan ("AOT" plugins).

`register` gives a `PluginDefinition` to TensorRT's Python plugin registry, where the ONNX parser finds it by the node's
type and domain. A built plan needs no Python.
"""

import inspect
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Any

import torch

from plugins.errors import PluginError
from plugins.triton_cache import check_capability
from plugins.triton_kernel import Size
from plugins.triton_ptx import compile_ptx
from plugins.trt_plugin import (
    NAMESPACE,
    Attributes,
    InPlace,
    InputTensor,
    PluginDefinition,
    SymbolicTensor,
    data_type,
    specialised,
    torch_dtype,
)
from plugins.trt_target import target_capability

TYPE_NAMES = {
    torch.float32: "FP32",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "FP8",
    torch.int8: "INT8",
    torch.int32: "INT32",
    torch.int64: "INT64",
}
"""TensorRT's names of tensor types in `AutoTuneCombination`."""


def register(definition: PluginDefinition) -> None:
    """Make the plugin known to TensorRT in this process; does nothing when it is known."""
    import numpy.typing  # noqa: F401 (TensorRT uses it and does not import it)
    import tensorrt.plugin as trtp

    if hasattr(getattr(trtp.op, NAMESPACE, None), definition.name):
        return
    describe, autotune, implement = _functions(definition)
    trtp.register(definition.plugin_id)(describe)
    trtp.autotune(definition.plugin_id)(autotune)
    trtp.aot_impl(definition.plugin_id)(implement)


def _functions(definition: PluginDefinition) -> tuple[Callable, Callable, Callable]:
    """The three functions that TensorRT asks for; it reads their signatures, which is why they are set."""
    import tensorrt.plugin as trtp

    count = len(definition.inputs)
    attribute_names = [name for name, _ in definition.attributes]

    def split(arguments: tuple, attributes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        given = dict(zip(attribute_names, arguments[count:], strict=False)) | dict(attributes)
        for name, kind in definition.attributes:  # TensorRT passes them by position, in the order of the creator
            if name in given and type(given[name]) is not kind:
                raise PluginError(f"{definition.name}: attribute {name} is {given[name]!r}, not {kind.__name__}.")
        return dict(zip(definition.inputs, arguments[:count], strict=True)), given

    def describe(*arguments: Any, **attributes: Any) -> Any:
        tensors, given = split(arguments, attributes)
        outputs = _described(definition, tensors, given)
        return outputs if definition.num_outputs > 1 else outputs[0]

    def autotune(*arguments: Any) -> Any:
        tensors, _ = split(arguments, {})
        for tensor in tensors.values():
            if torch_dtype(tensor.dtype) == torch.float8_e4m3fn:
                check_capability(torch.float8_e4m3fn, target_capability())
        return [
            trtp.AutoTuneCombination(", ".join(TYPE_NAMES[t] for t in types), "LINEAR") for types in definition.types
        ]

    def implement(*arguments: Any) -> Any:
        tensors, attributes = split(arguments, {})
        return aot_kernel(definition, tensors, attributes)

    inputs = [_parameter(name, trtp.TensorDesc) for name in definition.inputs]
    attributes = [_parameter(name, kind) for name, kind in definition.attributes]
    described = GenericAlias(tuple, (trtp.TensorDesc,) * definition.num_outputs)
    outputs = _parameter("outputs", described)
    result = described if definition.num_outputs > 1 else trtp.TensorDesc
    kernel = tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]
    _sign(describe, [*inputs, *attributes], result)
    _sign(autotune, [*inputs, *attributes, outputs], list[trtp.AutoTuneCombination])
    _sign(implement, [*inputs, *attributes, outputs, _parameter("tactic", int)], kernel)
    return describe, autotune, implement


def aot_kernel(definition: PluginDefinition, tensors: Mapping[str, Any], attributes: Attributes) -> tuple:
    """Kernel name, PTX, launch parameters and extra arguments for these `TensorDesc`s, as TensorRT asks for them."""
    import tensorrt.plugin as trtp

    described = {name: InputTensor(torch_dtype(desc.dtype), tuple(desc.shape)) for name, desc in tensors.items()}
    capability = target_capability()
    spec = specialised(definition, described, attributes, capability)
    kernel = compile_ptx(spec, capability)
    sizes = {size.name: _symbolic(tensors, size) for size in spec.sizes}
    launch = trtp.KernelLaunchParams(*spec.grid(sizes))
    launch.block_x = kernel.num_threads
    launch.shared_mem = kernel.shared_bytes
    extra = trtp.SymIntExprs(len(spec.sizes))
    for index, size in enumerate(spec.sizes):
        extra[index] = sizes[size.name]
    return kernel.entry, kernel.ptx, launch, extra


def _described(definition: PluginDefinition, tensors: Mapping[str, Any], attributes: Attributes) -> tuple[Any, ...]:
    """The outputs as TensorRT's `TensorDesc`s."""
    import tensorrt as trt
    import tensorrt.plugin as trtp

    inputs = {name: SymbolicTensor(torch_dtype(desc.dtype), tuple(desc.shape_expr)) for name, desc in tensors.items()}
    return tuple(
        tensors[output.name].aliased()
        if isinstance(output, InPlace)
        else trtp.from_shape_expr(output.shape, data_type(trt, output.dtype))
        for output in definition.outputs(inputs, attributes)
    )


def _symbolic(tensors: Mapping[str, Any], size: Size) -> Any:
    import tensorrt.plugin as trtp

    return trtp.SymInt32(tensors[size.tensor].shape_expr[size.dim])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _sign(function: Any, parameters: list[inspect.Parameter], result: Any) -> None:
    function.__signature__ = inspect.Signature(parameters, return_annotation=result)
