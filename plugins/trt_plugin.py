"""What a TensorRT plugin around an operator's Triton kernel is, as plain data that imports no TensorRT.

Two modules make plugins of it: `plugins.trt_aot` for TensorRT 11, which takes the kernel into the plan, and
`plugins.trt_v3` for TensorRT for RTX, whose plugin starts it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plugins.errors import PluginError
from plugins.triton_kernel import KernelSpec

NAMESPACE = "kvforge"
VERSION = "1"

DATA_TYPES = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "FP8",
    torch.int8: "INT8",
    torch.int32: "INT32",
    torch.int64: "INT64",
}
"""Members of TensorRT's `DataType`."""

Tensors = Mapping[str, "InputTensor"]
Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class InputTensor:
    """What a kernel may be specialised on: `shape` has -1 for dynamic dimensions."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def size(self, dim: int) -> int:
        """A dimension that must be the same in every step; raises PluginError for a dynamic one."""
        if self.shape[dim] < 0:
            raise PluginError(f"Dimension {dim} of {self.shape} must be a constant of the network; export it as one.")
        return self.shape[dim]


@dataclass(frozen=True)
class SymbolicTensor:
    """An input, or an output of its own; dimensions are integers or expressions of TensorRT's, which know
    `+ - * //` with the expression on the left."""

    dtype: torch.dtype
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class InPlace:
    """An output that is the input of this name, updated."""

    name: str


Outputs = tuple[SymbolicTensor | InPlace, ...]


@dataclass(frozen=True)
class PluginDefinition:
    """One plugin: the ONNX node it implements and the kernel that does it.

    `attributes` maps names to int or float; a node must carry all of them. `outputs(inputs, attributes)` describes the
    outputs. `types` are the supported dtypes, inputs then outputs, one tuple per combination; all tensors are linear.
    `spec` specialises the kernel for a compute capability (90: 9.0).
    """

    name: str
    inputs: tuple[str, ...]
    outputs: Callable[[Mapping[str, SymbolicTensor], Attributes], Outputs]
    num_outputs: int
    types: tuple[tuple[torch.dtype, ...], ...]
    spec: Callable[[Tensors, Attributes, int], KernelSpec]
    attributes: tuple[tuple[str, type], ...] = ()

    @property
    def plugin_id(self) -> str:
        return f"{NAMESPACE}::{self.name}"


def torch_dtype(data_type: Any) -> torch.dtype:
    """The torch dtype of a TensorRT `DataType`; raises PluginError for one the kernels do not know."""
    for dtype, name in DATA_TYPES.items():
        if data_type.name == name:
            return dtype
    raise PluginError(f"No kernel takes tensors of {data_type}; export the graph in a supported dtype.")


def data_type(module: Any, dtype: torch.dtype) -> Any:
    """The `DataType` of a TensorRT module for a torch dtype."""
    return getattr(module.DataType, DATA_TYPES[dtype])


def specialised(definition: PluginDefinition, tensors: Tensors, attributes: Attributes, capability: int) -> KernelSpec:
    """The plugin's kernel for these inputs; raises PluginError unless it takes them in order and writes as many outputs
    as the plugin has."""
    spec = definition.spec(tensors, attributes, capability)
    inputs = tuple(pointer.name for pointer in spec.inputs)
    if inputs != definition.inputs or len(spec.outputs) != definition.num_outputs:
        raise PluginError(f"{definition.name} has inputs {definition.inputs}, its kernel {spec.name} takes {inputs}.")
    return spec
