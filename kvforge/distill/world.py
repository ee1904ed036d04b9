"""One process, or the processes that torchrun started: sums over all, work of the first, sharded models."""

import datetime
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from kvforge.common.errors import KvforgeError
from kvforge.swiftkv import SwiftKVForCausalLM

Result = TypeVar("Result")


@contextmanager
def processes(device: str, timeout_seconds: float = 3600) -> Iterator[torch.device]:
    """Join the processes of torchrun, if it started this one, and yield this process's device.

    ``device`` is ``auto``, ``cpu`` or ``cuda``. A collective that waits longer than the timeout ends the run.

    Raises:
        KvforgeError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise KvforgeError("--device cuda: torch finds no GPU here; choose --device cpu or auto.")
    use_cuda = torch.cuda.is_available() and device != "cpu"
    if "TORCHELASTIC_RUN_ID" not in os.environ or dist.is_initialized():
        yield torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
        return
    local = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=datetime.timedelta(seconds=timeout_seconds)
    )
    try:
        yield local
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """This process's number; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def total(values: Tensor) -> Tensor:
    """Sum a tensor over all processes; returns it."""
    if size() > 1:
        dist.all_reduce(values)
    return values


def first_process(work: Callable[[], Result]) -> Result:
    """Run ``work`` in process 0 and return its result, which must be picklable, in all.

    Raises:
        KvforgeError, OSError: the one that ``work`` raised, in process 0; the others end without a word.
    """
    if size() == 1:
        return work()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = work()
        except (KvforgeError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is None:
        return outcome[0]
    if rank() == 0:
        raise outcome[1]
    raise SystemExit(1)


def fail(message: str) -> NoReturn:
    """Raise KvforgeError in process 0 and end the others, which all must have found the same."""
    if rank() == 0:
        raise KvforgeError(message)
    raise SystemExit(1)


def shard(root: nn.Module, models: list[SwiftKVForCausalLM], device: torch.device) -> None:
    """Shard every layer of the models over all processes with FSDP2, and what remains of ``root`` around them.

    Layers move to ``device`` one by one, so that no device holds a whole model. Attention is a unit of its own: K and V
    above the cut are computed outside of the layer's forward.
    """
    # K and V are views that nothing changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = dist.init_device_mesh(device.type, (size(),))
    for model in models:
        for layer in model.model.layers:
            fully_shard(layer.self_attn, mesh=mesh)
            register_fsdp_forward_method(layer.self_attn, "key_value")
            fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)


def gathered(tensor: Tensor) -> Tensor:
    """Return a whole copy on the CPU of a tensor that may be sharded; all processes must call this together."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def assign(target: Tensor, value: Tensor | None) -> None:
    """Overwrite a tensor that may be sharded with process 0's ``value`` (None elsewhere); all call this together."""
    with torch.no_grad():
        if not isinstance(target, DTensor):
            assert value is not None
            target.copy_(value)
            return
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if value is not None:
            whole.copy_(value)
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
