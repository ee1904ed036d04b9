"""How an engine stores the heads of q and k: its kernels rotate element i with i + head_dim / 2 and know no amplitude.

So rows move to where their partners are half a head apart, and those that rotate have the amplitude in them. Scores and
cached keys are those of the checkpoint's own order, with their elements in another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_defs.rope import RopeConfig


@dataclass(frozen=True)
class RotaryRows:
    """The rows of a tensor that holds whole heads of q or k in dim 0: in each ``passed`` elements that stay, and
    ``head_dim`` that ``rope`` knows of. With ``is_last`` no other tensor comes between them and the rotation, and they
    take the amplitude."""

    rope: RopeConfig
    head_dim: int
    is_last: bool = True
    passed: int = 0

    @property
    def size(self) -> int:
        """Rows of a head."""
        return self.passed + self.head_dim

    @property
    def is_nothing(self) -> bool:
        """Whether the engine's rows are the checkpoint's."""
        return self.order(self.size) is None and self.factors(self.size) is None

    def order(self, num_rows: int) -> Tensor | None:
        """Return where the checkpoint has each of the engine's rows, int64 ``[num_rows]``; None where they are as
        there."""
        order = head_order(self.rope, self.head_dim)
        if order is None:
            return None
        order = torch.cat((torch.arange(self.passed), self.passed + order))
        return (torch.arange(0, num_rows, self.size)[:, None] + order).flatten()

    def factors(self, num_rows: int) -> Tensor | None:
        """Return what each of the engine's rows is multiplied by, fp32 ``[num_rows]``; None for 1 everywhere."""
        if not self.is_last or self.rope.amplitude == 1.0:
            return None
        of_head = torch.cat((torch.ones(self.passed), amplitudes(self.rope, self.head_dim).repeat(2)))
        return of_head.repeat(num_rows // self.size)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the engine's rows of the checkpoint's ``[num_rows, …]``: in fp32 or wider where they are multiplied,
        else in their dtype."""
        order, factors = self.order(rows.shape[0]), self.factors(rows.shape[0])
        rows = rows if order is None else rows[order]
        if factors is None:
            return rows
        return rows.to(torch.promote_types(rows.dtype, torch.float32)) * factors.view(-1, *(1,) * (rows.dim() - 1))


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
