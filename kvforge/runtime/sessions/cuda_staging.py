"""The int32 tensors of a step on their way to the GPU: one pinned buffer, one asynchronous copy."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many elements (256 bytes), as compiled graphs assume of their inputs."""

_SLOTS = 2
"""Pinned buffers in turn, so that the next step is written while the last one's copy is still queued."""


class StepBuffer:
    """Memory for one set of int32 tensors at a time.

    Tensors of equal shapes always lie at the same device addresses, which a captured CUDA graph relies on. Copies
    and kernels run in order on one stream, so a copy never overtakes the kernels that read what it replaces.
    ``device`` may be the CPU, where staging is a plain copy.
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host = [torch.zeros(num_elements, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(_SLOTS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _SLOTS
        self._device = torch.zeros(num_elements, dtype=torch.int32, device=device)
        self._turn = 0
        self._shapes: list[Sequence[int]] = []

    def host(self, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return tensors of these shapes to be filled; what they hold before is arbitrary."""
        self._turn = (self._turn + 1) % _SLOTS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        self._shapes = list(shapes)
        return views(self._host[self._turn], shapes)

    def device(self) -> list[Tensor]:
        """Queue the copy of what ``host`` returned and return the same tensors on the device."""
        size = num_elements(self._shapes)
        self._device[:size].copy_(self._host[self._turn][:size], non_blocking=True)
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
            self._copied[self._turn] = event
        return views(self._device, self._shapes)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return these CPU tensors on the device."""
        for target, source in zip(self.host([tensor.shape for tensor in tensors]), tensors, strict=True):
            target.copy_(source)
        return self.device()


def num_elements(shapes: Sequence[Sequence[int]]) -> int:
    """Return the elements that aligned tensors of these shapes take together."""
    return sum(-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)


def views(memory: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return aligned views of flat ``memory``, one after the other."""
    result, offset = [], 0
    for shape in shapes:
        result.append(memory[offset : offset + math.prod(shape)].view(tuple(shape)))
        offset += num_elements([shape])
    return result


class CopiedTokens:
    """Token ids [R], int32, and their copy to pinned memory, queued behind what computes them."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = self._host = ids
        self._copied: torch.cuda.Event | None = None
        if ids.is_cuda:
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def collect(self) -> Tensor:
        """Wait for the copy alone and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
