"""Starts kernels through the CUDA driver API, with the arguments in TensorRT's order; needs nothing but libcuda."""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from plugins.triton_kernel import KernelSpec, Pointer
from plugins.triton_ptx import CompiledKernel, compile_ptx

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


Argument: TypeAlias = int | torch.Tensor | ctypes.c_void_p
"""Of a kernel: a size, a tensor, or a tensor's address."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(message))
        raise RuntimeError(f"{what} failed with {code}: {(message.value or b'?').decode()}")


def _passed(value: Argument) -> ctypes.c_void_p | ctypes.c_int32:
    if isinstance(value, ctypes.c_void_p):
        return value
    return ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else ctypes.c_int32(value)


class LoadedKernel:
    """A kernel in the current CUDA context, of PTX, which the driver compiles, or of a cubin.

    `image`: PTX or cubin. `shared_bytes`: dynamic shared memory of a block of `num_threads`.
    Raises RuntimeError when the driver takes it not.
    """

    def __init__(self, image: bytes, entry: str, num_threads: int, shared_bytes: int) -> None:
        self.num_threads, self.shared_bytes = num_threads, shared_bytes
        self._module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), image), "cuModuleLoadData")
        name = entry.encode()
        _check(driver.cuModuleGetFunction(ctypes.byref(self.function), self._module, name), "cuModuleGetFunction")
        if shared_bytes > 48 * 1024:
            code = driver.cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, shared_bytes)
            _check(code, "cuFuncSetAttribute")

    def start(self, grid: tuple[int, int, int], arguments: Sequence[Argument], stream: int | None = None) -> None:
        """Queue the kernel on a CUDA stream, torch's current one unless told otherwise; tensors are passed by address,
        ints as int32."""
        values = [_passed(value) for value in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        handle = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if stream is None else stream)
        code = _driver().cuLaunchKernel(
            self.function, *grid, self.num_threads, 1, 1, self.shared_bytes, handle, addresses, None
        )
        _check(code, "cuLaunchKernel")


def ordered_arguments(spec: KernelSpec, tensors: Mapping[str, torch.Tensor]) -> list[Argument]:
    """Return the kernel's arguments as TensorRT passes them: inputs, sizes, outputs."""
    sizes = {size.name: tensors[size.tensor].shape[size.dim] for size in spec.sizes}
    return [tensors[a.name] if isinstance(a, Pointer) else sizes[a.name] for a in spec.arguments]


def load_ptx(compiled: CompiledKernel) -> LoadedKernel:
    """Load a kernel that `plugins.triton_ptx` compiled."""
    return LoadedKernel(compiled.ptx.encode(), compiled.entry, compiled.num_threads, compiled.shared_bytes)


def spec_key(spec: KernelSpec) -> tuple[Any, ...]:
    """What two kernels of the same machine code have in common."""
    types = tuple(argument.type for argument in spec.arguments)
    return spec.name, types, repr(spec.constants), spec.num_warps, spec.num_stages


class DriverRunner:
    """Takes the place of `plugins.triton_kernel.run_kernel`: `load` makes a kernel of a spec when it is first
    started, by default by compiling its PTX for `capability`."""

    def __init__(self, capability: int, load: Callable[[KernelSpec], LoadedKernel] | None = None) -> None:
        self._load = load or (lambda spec: load_ptx(compile_ptx(spec, capability)))
        self.kernels: list[str] = []
        self._loaded: dict[tuple[Any, ...], LoadedKernel] = {}

    def __call__(self, spec: KernelSpec, tensors: Mapping[str, torch.Tensor], wrap: Any = None) -> None:
        sizes = {size.name: tensors[size.tensor].shape[size.dim] for size in spec.sizes}
        grid = tuple(int(entry) for entry in spec.grid(sizes))
        self.kernels.append(spec.name)
        if 0 in grid:
            return
        key = spec_key(spec)
        if key not in self._loaded:
            self._loaded[key] = self._load(spec)
        self._loaded[key].start(grid, ordered_arguments(spec, tensors))  # type: ignore[arg-type]
