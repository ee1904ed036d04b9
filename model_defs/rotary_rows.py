"""How an engine stores the heads of q and k: its kernels rotate element i with i + head_dim / 2 and know no amplitude.

So rows move to where their partners are half a head apart, and those that rotate have the amplitude in them. Scores and
cached keys are those of the checkpoint's own order, with their elements in another.
"""

import torch
from torch import Tensor

from model_defs.rope_config import RopeConfig, RotaryRows


def order_of_rows(rows: RotaryRows, num_rows: int) -> Tensor | None:
    """Return where the checkpoint has each of the engine's rows, int64 ``[num_rows]``; None where they are as there."""
    order = head_order(rows.rope, rows.head_dim)
    if order is None:
        return None
    behind = torch.arange(rows.size - rows.behind, rows.size)
    order = torch.cat((torch.arange(rows.passed), rows.passed + order, behind))
    return (torch.arange(0, num_rows, rows.size)[:, None] + order).flatten()


def factors_of_rows(rows: RotaryRows, num_rows: int) -> Tensor | None:
    """Return what each of the engine's rows is multiplied by, fp32 ``[num_rows]``; None for 1 everywhere."""
    if not rows.has_factors:
        return None
    of_rope = amplitudes(rows.rope, rows.head_dim).repeat(2)
    of_head = torch.cat((torch.ones(rows.passed), of_rope, torch.ones(rows.behind)))
    return of_head.repeat(num_rows // rows.size)


def engine_rows(rows: RotaryRows, stored: Tensor) -> Tensor:
    """Return the engine's rows of the checkpoint's ``[num_rows, …]``: in fp32 or wider where they are multiplied, else
    in their dtype."""
    order, factors = order_of_rows(rows, stored.shape[0]), factors_of_rows(rows, stored.shape[0])
    stored = stored if order is None else stored[order]
    if factors is None:
        return stored
    return stored.to(torch.promote_types(stored.dtype, torch.float32)) * factors.view(-1, *(1,) * (stored.dim() - 1))


def head_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Return where the checkpoint has each element of an engine's head, int64 ``[head_dim]``; None for the same."""
    dim = rope.rotary_dim(head_dim)
    if dim == head_dim and not rope.interleaved:
        return None
    rotated, passed = torch.arange(dim), torch.arange(dim, head_dim)
    first, second = (rotated[0::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    half = len(passed) // 2
    return torch.cat((first, passed[:half], second, passed[half:]))


def amplitudes(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return what each pair of an engine's head is multiplied by, fp32 ``[head_dim / 2]``."""
    rotated = rope.rotary_dim(head_dim) // 2
    return torch.cat((torch.full((rotated,), rope.amplitude), torch.ones(head_dim // 2 - rotated)))
