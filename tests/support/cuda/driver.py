"""Starts a kernel's PTX through the CUDA driver API with TensorRT's argument order; needs nothing but libcuda."""

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch

from plugins.triton_kernel import KernelSpec, Pointer
from plugins.triton_ptx import CompiledKernel, compile_ptx

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(message))
        raise RuntimeError(f"{what} failed with {code}: {(message.value or b'?').decode()}")


class LoadedKernel:
    """A compiled kernel in the current CUDA context."""

    def __init__(self, compiled: CompiledKernel) -> None:
        self.compiled = compiled
        self._module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), compiled.ptx.encode()), "cuModuleLoadData")
        name = compiled.entry.encode()
        _check(driver.cuModuleGetFunction(ctypes.byref(self.function), self._module, name), "cuModuleGetFunction")
        if compiled.shared_bytes > 48 * 1024:
            code = driver.cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, compiled.shared_bytes)
            _check(code, "cuFuncSetAttribute")

    def start(self, grid: tuple[int, int, int], arguments: list[int | torch.Tensor]) -> None:
        """Queue the kernel on torch's current stream; tensors are passed by address, ints as int32."""
        values = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else ctypes.c_int32(value)
            for value in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = _driver().cuLaunchKernel(
            self.function, *grid, self.compiled.num_threads, 1, 1, self.compiled.shared_bytes, stream, addresses, None
        )
        _check(code, "cuLaunchKernel")


def ordered_arguments(spec: KernelSpec, tensors: Mapping[str, torch.Tensor]) -> list[int | torch.Tensor]:
    """Return the kernel's arguments as TensorRT passes them: inputs, sizes, outputs."""
    sizes = {size.name: tensors[size.tensor].shape[size.dim] for size in spec.sizes}
    return [tensors[a.name] if isinstance(a, Pointer) else sizes[a.name] for a in spec.arguments]


class DriverRunner:
    """Takes the place of ``plugins.triton_kernel.run_kernel``: compiles to PTX and starts that."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.kernels: list[str] = []
        self._loaded: dict[tuple[Any, ...], LoadedKernel] = {}

    def __call__(self, spec: KernelSpec, tensors: Mapping[str, torch.Tensor], wrap: Any = None) -> None:
        sizes = {size.name: tensors[size.tensor].shape[size.dim] for size in spec.sizes}
        grid = tuple(int(entry) for entry in spec.grid(sizes))
        self.kernels.append(spec.name)
        if 0 in grid:
            return
        types = tuple(argument.type for argument in spec.arguments)
        key = (spec.name, types, repr(spec.constants), spec.num_warps, spec.num_stages)
        if key not in self._loaded:
            self._loaded[key] = LoadedKernel(compile_ptx(spec, self.capability))
        self._loaded[key].start(grid, ordered_arguments(spec, tensors))  # type: ignore[arg-type]
