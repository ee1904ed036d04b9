"""Notes of a prompt's last tokens, one pool row for each sequence, for KV policies that score by them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepNotes:
    """Of a step's S sequences, int32 ``[S]``: the rows that they have in pools of notes, how many of their last queries
    are noted, and the place of the first of these."""

    slot: Tensor
    num_noted: Tensor
    place: Tensor
    seen: list[Tensor] = field(default_factory=list)
    """K pools whose owners have noted: layers that share one note nothing."""

    def write(self, notes: Tensor, values: Tensor, k_pool: Tensor, query_start: Tensor) -> None:
        """Write ``values`` ``[T, ...]`` of the noted queries to ``notes`` ``[slots, places + 1, ...]``, both float32,
        once for each K pool. The last place of the first row is for those that are not noted: nobody reads it."""
        if any(k_pool is one for one in self.seen):
            return
        self.seen.append(k_pool)
        token = torch.arange(values.shape[0], dtype=torch.int32, device=values.device)
        row = torch.bucketize(token, query_start[1:], right=True)
        behind = token - query_start[1:][row] + self.num_noted[row]
        rows = torch.where(behind >= 0, self.slot[row], 0).long()
        places = torch.where(behind >= 0, self.place[row] + behind, notes.shape[1] - 1).long()
        notes.index_put_((rows, places), values)
