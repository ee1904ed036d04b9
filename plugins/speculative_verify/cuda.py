"""SpeculativeVerify on the GPU: the Triton kernel's specification and launch."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from plugins.speculative_verify.cuda_kernel import speculative_verify_kernel
from plugins.triton_kernel import KernelSpec, Pointer, Size, run_kernel

_BLOCK = 4096


def kernel_spec(vocab: int, block: int = _BLOCK) -> KernelSpec:
    """The kernel for a vocabulary of this size; all tensors are contiguous, `block` tokens are read at a time."""
    return KernelSpec(
        name="speculative_verify",
        function=speculative_verify_kernel,
        inputs=(
            Pointer("logits", torch.float32),
            Pointer("draft_ids", torch.int32),
            Pointer("draft_start", torch.int32),
            Pointer("draft_probs", torch.float32),
            Pointer("temperature", torch.float32),
            Pointer("uniform", torch.float32),
        ),
        sizes=(Size("num_sequences", "temperature", 0), Size("num_probs", "draft_probs", 0)),
        outputs=(Pointer("accepted", torch.int32), Pointer("next_token", torch.int32)),
        constants=(("VOCAB", vocab), ("BLOCK", min(block, triton.next_power_of_2(vocab)))),
        grid=lambda sizes: (sizes["num_sequences"], 1, 1),
        num_warps=16 if vocab >= block else 4,
    )


def launch(
    logits: Tensor,
    draft_ids: Tensor,
    draft_start: Tensor,
    draft_probs: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    *,
    wrap: Callable[[Any], Any] | None = None,
    block: int = _BLOCK,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `plugins.speculative_verify`, on the GPU.

    wrap: as in `plugins.triton_kernel.run_kernel`.
    """
    accepted, next_token = (temperature.new_empty(temperature.shape, dtype=torch.int32) for _ in range(2))
    tensors = {
        "logits": logits.contiguous(),
        "draft_ids": draft_ids,
        "draft_start": draft_start,
        "draft_probs": draft_probs.contiguous(),
        "temperature": temperature,
        "uniform": uniform.contiguous(),
        "accepted": accepted,
        "next_token": next_token,
    }
    run_kernel(kernel_spec(logits.shape[1], block), tensors, wrap)
    return accepted, next_token
