"""Plugins of TensorRT for RTX around the operators' Triton kernels: an IPluginV3 that starts the kernel.

RTX takes no kernel into a plan as its own. Its plugin says what the one of TensorRT 11 says, puts its attributes and
the PTX of its kernels into the plan, and starts the one that fits the GPU. So running a plan needs Python and this
module, and no Triton.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorrt_rtx_bindings as trt
import torch

from plugins.cuda_driver import LoadedKernel
from plugins.errors import PluginError
from plugins.trt_launch import Launch, choose, launches, pack, unpack
from plugins.trt_plugin import (
    NAMESPACE,
    VERSION,
    InPlace,
    InputTensor,
    Outputs,
    PluginDefinition,
    SymbolicTensor,
    data_type,
    torch_dtype,
)
from plugins.trt_target import target_capabilities

KERNELS = "kernels"
"""The field of a plan that holds the plugin's kernels, beside its attributes."""

_FIELD_TYPES = {float: (np.float32, trt.PluginFieldType.FLOAT32), int: (np.int32, trt.PluginFieldType.INT32)}
_ANY_SHAPE = (1,) * trt.Dims.MAX_DIMS

_creators: dict[str, "Creator"] = {}
"""Those that are registered: the registry keeps no reference."""


def register(definition: PluginDefinition) -> None:
    """Make the plugin known to TensorRT for RTX in this process; does nothing when it is known."""
    if definition.name in _creators:
        return
    creator = Creator(definition)
    if not trt.get_plugin_registry().register_creator(creator, NAMESPACE):
        raise PluginError(f"TensorRT for RTX {trt.__version__} does not take the plugin {definition.name}.")
    _creators[definition.name] = creator


class Dimension:
    """A dimension of the network, as its builder computes with it."""

    def __init__(self, builder: trt.IExprBuilder, expression: trt.IDimensionExpr) -> None:
        self._builder, self.expression = builder, expression

    def __add__(self, other: Any) -> "Dimension":
        return self._computed(trt.DimensionOperation.SUM, other)

    def __sub__(self, other: Any) -> "Dimension":
        return self._computed(trt.DimensionOperation.SUB, other)

    def __mul__(self, other: Any) -> "Dimension":
        return self._computed(trt.DimensionOperation.PROD, other)

    def __floordiv__(self, other: Any) -> "Dimension":
        return self._computed(trt.DimensionOperation.FLOOR_DIV, other)

    def _computed(self, operation: trt.DimensionOperation, other: Any) -> "Dimension":
        right = _expression(other, self._builder)
        return Dimension(self._builder, self._builder.operation(operation, self.expression, right))


def _expression(size: Any, builder: trt.IExprBuilder) -> trt.IDimensionExpr:
    return size.expression if isinstance(size, Dimension) else builder.constant(int(size))


class Creator(trt.IPluginCreatorV3One):
    """Makes the plugin of one definition, for a node of a network or from a plan."""

    def __init__(self, definition: PluginDefinition) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self.definition = definition
        self.name, self.plugin_namespace, self.plugin_version = definition.name, NAMESPACE, VERSION
        self._fields = _Fields()
        for name, kind in definition.attributes:
            self._fields.attribute(name, kind, 0)
        self.field_names = self._fields.collection()

    def create_plugin(self, name: str, field_collection: Any, phase: trt.TensorRTPhase) -> "Plugin":
        fields = {field.name: field.data for field in field_collection}
        kernels = unpack(np.asarray(fields[KERNELS]).tobytes()) if KERNELS in fields else ()
        return Plugin(self.definition, read_attributes(self.definition, fields), kernels)


class _Fields:
    """Fields for TensorRT, whose memory is theirs as long as this lives: a PluginField keeps an address alone."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def attribute(self, name: str, kind: type, value: float) -> None:
        dtype, field_type = _FIELD_TYPES[kind]
        self._keep(name, np.array([value], dtype), field_type)

    def data(self, name: str, data: bytes) -> None:
        self._keep(name, np.frombuffer(data, np.int8), trt.PluginFieldType.INT8)

    def collection(self) -> Any:
        return trt.PluginFieldCollection([field for _, field in self._kept])

    def _keep(self, name: str, array: np.ndarray, field_type: trt.PluginFieldType) -> None:
        self._kept.append((array, trt.PluginField(name, array, field_type)))


def read_attributes(definition: PluginDefinition, fields: Mapping[str, Any]) -> dict[str, float | int]:
    """The plugin's attributes from a node's or a plan's fields; raises PluginError where one is missing or of another
    type."""
    attributes: dict[str, float | int] = {}
    for name, kind in definition.attributes:
        value = np.asarray(fields.get(name, ())).reshape(-1)
        if len(value) != 1 or np.issubdtype(value.dtype, np.floating) != (kind is float):
            raise PluginError(f"{definition.name}: attribute {name} is {fields.get(name)!r}, not {kind.__name__}.")
        attributes[name] = kind(value[0])
    return attributes


@functools.lru_cache(maxsize=256)
def _loaded(launch: Launch, device: int) -> LoadedKernel:
    return LoadedKernel(launch.ptx.encode(), launch.entry, launch.num_threads, launch.shared_bytes)


class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
    """One node. `tensors` are its inputs once the builder has configured it, `kernels` what a plan held."""

    def __init__(
        self, definition: PluginDefinition, attributes: Mapping[str, float | int], kernels: Sequence[Launch] = ()
    ) -> None:
        trt.IPluginV3.__init__(self)
        trt.IPluginV3OneCore.__init__(self)
        trt.IPluginV3OneBuildV2.__init__(self)
        trt.IPluginV3OneRuntime.__init__(self)
        self.plugin_name, self.plugin_namespace, self.plugin_version = definition.name, NAMESPACE, VERSION
        self.num_outputs = definition.num_outputs
        self.definition, self.attributes, self.kernels = definition, dict(attributes), tuple(kernels)
        self.tensors: dict[str, InputTensor] = {}
        self._launch: Launch | None = None
        self._device = -1
        self._fields = _Fields()

    def get_capability_interface(self, type: Any) -> "Plugin":
        return self

    def clone(self) -> "Plugin":
        copy = Plugin(self.definition, self.attributes, self.kernels)
        copy.tensors = dict(self.tensors)
        return copy

    def get_output_data_types(self, input_types: Sequence[trt.DataType]) -> list[trt.DataType]:
        inputs = [SymbolicTensor(torch_dtype(kind), _ANY_SHAPE) for kind in input_types]
        return [data_type(trt, output.dtype) for output in self._as_tensors(inputs)]

    def get_output_shapes(
        self, inputs: Sequence[trt.DimsExprs], shape_inputs: Sequence[trt.DimsExprs], expr_builder: trt.IExprBuilder
    ) -> list[trt.DimsExprs]:
        symbolic = [
            SymbolicTensor(torch.float32, tuple(Dimension(expr_builder, shape[i]) for i in range(len(shape))))
            for shape in inputs
        ]
        shapes = []
        for output in self._as_tensors(symbolic):
            shape = trt.DimsExprs(len(output.shape))
            for index, size in enumerate(output.shape):
                shape[index] = _expression(size, expr_builder)
            shapes.append(shape)
        return shapes

    def get_aliased_input(self, output_index: int) -> int:
        output = self._outputs([SymbolicTensor(torch.float32, _ANY_SHAPE) for _ in self.definition.inputs])[
            output_index
        ]
        return self.definition.inputs.index(output.name) if isinstance(output, InPlace) else -1

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        if in_out[pos].desc.format != trt.TensorFormat.LINEAR:
            return False
        asked = tuple(tensor.desc.type for tensor in in_out[: pos + 1])
        return any(tuple(data_type(trt, t) for t in types[: pos + 1]) == asked for types in self.definition.types)

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.tensors = {
            name: InputTensor(torch_dtype(tensor.desc.type), tuple(tensor.desc.dims))
            for name, tensor in zip(self.definition.inputs, inputs, strict=True)
        }

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Nothing depends on the sizes of a step but the grid."""

    def set_tactic(self, tactic: int) -> None:
        """There is one kernel."""

    def attach_to_context(self, resource_context: Any) -> "Plugin":
        return self.clone()

    def get_fields_to_serialize(self) -> Any:
        self._fields = _Fields()
        for name, kind in self.definition.attributes:
            self._fields.attribute(name, kind, self.attributes[name])
        self._fields.data(KERNELS, pack(kernels_of(self)))
        return self._fields.collection()

    def enqueue(
        self,
        input_desc: Sequence[trt.PluginTensorDesc],
        output_desc: Sequence[trt.PluginTensorDesc],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        device = torch.cuda.current_device()
        if self._launch is None or self._device != device:
            major, minor = torch.cuda.get_device_capability(device)
            self._launch, self._device = choose(kernels_of(self), 10 * major + minor), device
        launch = self._launch
        sizes = launch.sizes_of([tuple(desc.dims) for desc in input_desc])
        grid = launch.grid_of(sizes)
        if 0 not in grid:
            addresses = [ctypes.c_void_p(pointer) for pointer in (*inputs, *outputs)]
            _loaded(launch, device).start(grid, [*addresses[: len(inputs)], *sizes, *addresses[len(inputs) :]], stream)

    def _outputs(self, inputs: Sequence[SymbolicTensor]) -> Outputs:
        return self.definition.outputs(dict(zip(self.definition.inputs, inputs, strict=True)), self.attributes)

    def _as_tensors(self, inputs: Sequence[SymbolicTensor]) -> list[SymbolicTensor]:
        """The outputs, those in place as their inputs."""
        return [
            inputs[self.definition.inputs.index(output.name)] if isinstance(output, InPlace) else output
            for output in self._outputs(inputs)
        ]


def kernels_of(plugin: Plugin) -> tuple[Launch, ...]:
    """The kernels that a plan held, else compiled for `target_capabilities` and the inputs that the builder named."""
    return plugin.kernels or launches(plugin.definition, plugin.tensors, plugin.attributes, target_capabilities())
