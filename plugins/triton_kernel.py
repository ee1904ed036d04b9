"""What a Triton kernel of an operator is: its arguments in TensorRT's order, its constants and its grid.

One `KernelSpec` serves all who start the kernel: `launch` (PyTorch), `plugins.triton_ptx` (PTX without a GPU) and
the TensorRT plugin around that PTX. TensorRT passes a kernel its inputs, then int32 sizes, then its outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
"""Triton's name of a pointer to each dtype."""

Grid = Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Pointer:
    """A tensor argument; its memory is aligned to 16 bytes."""

    name: str
    dtype: torch.dtype

    @property
    def type(self) -> str:
        return POINTER_TYPES[self.dtype]


@dataclass(frozen=True)
class Size:
    """An int32 argument: dimension `dim` of the input named `tensor`."""

    name: str
    tensor: str
    dim: int

    type = "i32"


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of one kernel.

    `inputs`, `sizes` and `outputs`, in this order, are the arguments of the compiled kernel. An output that is an
    input updated in place is named `<input>_out` and has the same address. `constants` are compile-time values; an
    input that this specialisation lacks is the constant None. `grid` maps the sizes, by name, to the three grid
    dimensions with nothing but `+ - * //`, the size on the left, so that they may be symbolic.

    Raises ValueError when the kernel's own parameters are not these.
    """

    name: str
    function: Any
    inputs: tuple[Pointer, ...]
    sizes: tuple[Size, ...]
    outputs: tuple[Pointer, ...]
    constants: tuple[tuple[str, Any], ...]
    grid: Grid
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        names = {name for name, _ in self.constants}
        declared = [argument.name for argument in self.arguments]
        actual = [name for name in self.function.arg_names if name not in names]
        if declared != actual or not names <= set(self.function.arg_names):
            raise ValueError(f"{self.name}: the kernel takes ({', '.join(actual)}), declared ({', '.join(declared)}).")

    @property
    def arguments(self) -> tuple[Pointer | Size, ...]:
        return (*self.inputs, *self.sizes, *self.outputs)


def ceil_div(size: Any, by: int) -> Any:
    """`size / by` rounded up; `size` may be symbolic."""
    return (size + (by - 1)) // by


def run_kernel(spec: KernelSpec, tensors: Mapping[str, torch.Tensor], wrap: Callable[[Any], Any] | None = None) -> None:
    """Start the kernel on CUDA tensors, or on CPU tensors under Triton's interpreter.

    tensors: every input and output by name. wrap: what to start instead of the kernel itself, for example
    `torch.library.wrap_triton`. Nothing here waits for the device.
    """
    sizes = {size.name: tensors[size.tensor].shape[size.dim] for size in spec.sizes}
    pointers = {pointer.name: tensors[pointer.name] for pointer in (*spec.inputs, *spec.outputs)}
    kernel = spec.function if wrap is None else wrap(spec.function)
    kernel[spec.grid(sizes)](
        **pointers, **sizes, **dict(spec.constants), num_warps=spec.num_warps, num_stages=spec.num_stages
    )
