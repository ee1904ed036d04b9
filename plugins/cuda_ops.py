"""The CUDA backend of the operators in torch: eager calls, and their place inside compiled packages.

Eagerly an operator on CUDA tensors starts its Triton kernels. Inside a compiled graph it is replaced by the kernels
themselves (`torch.library.wrap_triton`, the mechanics of `torch.library.triton_op`), so that AOTInductor puts their
machine code into the package and serving runs no Python. `torch.export` keeps the operator as one node.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plugins.errors import PluginError
from plugins.operator import NAMESPACE
from plugins.registry import backend_modules

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_lock = threading.Lock()
_registered = False


def register() -> None:
    """Make the operators run on CUDA tensors in this process. Idempotent; needs no GPU.

    Raises PluginError when Triton is not installed.
    """
    global _registered
    with _lock:
        if _registered:
            return
        try:
            launches = {name: module.launch for name, module in backend_modules("triton").items()}
        except ImportError as error:
            raise PluginError(
                f"The operators need Triton to run on a GPU, and it cannot be imported ({error}); install a CUDA build "
                "of torch, which brings it."
            ) from error
        for name, launch in launches.items():
            _LIBRARY.impl(name, launch, "CUDA")
            _register_decomposition(name, functools.partial(launch, wrap=WrappedKernel))
        _registered = True


class WrappedKernel:
    """A kernel that a graph records instead of running: `WrappedKernel(kernel)[grid](**arguments)`.

    A tensor updated in place is two arguments of our kernels, input and output at one address. The graph gets it
    once, as the output: with both, functionalization would copy the pools.
    """

    def __init__(self, kernel: Any) -> None:
        from triton.runtime.jit import JITFunction

        # An interpreted kernel cannot be recorded: it runs at once, as it would anywhere else.
        self._kernel = torch.library.wrap_triton(kernel) if isinstance(kernel, JITFunction) else kernel

    def __getitem__(self, grid: Sequence[Any]) -> Callable[..., Any]:
        return functools.partial(self._start, tuple(grid))

    def _start(self, grid: tuple[Any, ...], **arguments: Any) -> Any:
        return self._kernel[grid](**without_aliased_inputs(arguments))


def without_aliased_inputs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with None for every `<name>` that has its `<name>_out` beside it."""
    return {name: None if f"{name}_out" in arguments else value for name, value in arguments.items()}


def _register_decomposition(name: str, decomposition: Callable[..., Any]) -> None:
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if _is_exporting() or not _on_cuda(args):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return decomposition(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(f"{NAMESPACE}::{name}", FunctionalTensorMode, rule, lib=_LIBRARY)


def _is_exporting() -> bool:
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return custom_triton_ops_decomposition_disabled()


def _on_cuda(args: tuple[Any, ...]) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" for leaf in pytree.tree_leaves(args))
