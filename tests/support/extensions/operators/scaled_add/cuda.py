"""ScaledAdd in Triton: one program per block of elements."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.triton_kernel import KernelSpec, Pointer, Size, ceil_div, run_kernel

_BLOCK = 256


@triton.jit
def scaled_add_kernel(x, y, count, out, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(out + index, tl.load(x + index, inside) + SCALE * tl.load(y + index, inside), inside)


def kernel_spec(scale: float) -> KernelSpec:
    """The kernel for one scale; all tensors are flat."""
    return KernelSpec(
        name="scaled_add",
        function=scaled_add_kernel,
        inputs=(Pointer("x", torch.float32), Pointer("y", torch.float32)),
        sizes=(Size("count", "x", 0),),
        outputs=(Pointer("out", torch.float32),),
        constants=(("SCALE", scale), ("BLOCK", _BLOCK)),
        grid=lambda sizes: (ceil_div(sizes["count"], _BLOCK), 1, 1),
    )


def launch(x: Tensor, y: Tensor, scale: float = 1.0, *, wrap: Callable[[Any], Any] | None = None) -> Tensor:
    """Same arguments and result as `plugins.scaled_add`, on the GPU."""
    out = torch.empty_like(x)
    run_kernel(kernel_spec(scale), {"x": x.flatten(), "y": y.flatten(), "out": out.view(-1)}, wrap)
    return out
