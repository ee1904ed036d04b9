"""The rows of a step that go past the cut, gathered, where they are not all of the step's."""

import numpy as np
import torch

from kvforge.runtime.sessions.inputs import UpperStep
from kvforge.runtime.sessions.policy_inputs import PolicyInputs


def all_rows(
    hidden: torch.Tensor,
    start: torch.Tensor,
    positions: torch.Tensor,
    kv_length: torch.Tensor,
    page_table: torch.Tensor,
    state: PolicyInputs = (),
) -> UpperStep:
    """Return the step in which every row of ``hidden`` goes past the cut."""
    everyone = torch.arange(len(positions), dtype=torch.int32)
    return UpperStep(hidden, everyone, start, positions, kv_length, page_table, state)


def gather(hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Return a copy of these rows of a hidden state, on its device."""
    return hidden.index_select(0, torch.from_numpy(rows).to(hidden.device))


def starts(counts: np.ndarray) -> torch.Tensor:
    """Return where each of S sequences of ``counts`` [S] rows begins, and the end: int32 [S+1]."""
    ends = torch.zeros(len(counts) + 1, dtype=torch.int32)
    torch.cumsum(torch.from_numpy(counts), 0, dtype=torch.int32, out=ends[1:])
    return ends
