"""The rows of a step that go past the cut, gathered: what ``upper`` needs where they are not all of the step's."""

from dataclasses import dataclass

import numpy as np
import torch

from kvforge.runtime.pools import Pools
from kvforge.runtime.session import StepFunctions
from kvforge.runtime.shadow_inputs import ShadowTensors, given


@dataclass(frozen=True)
class Survivors:
    """R >= 1 rows of S sequences, each sequence's the last tokens of its ``kv_length``, in order; int32 on the CPU."""

    hidden: torch.Tensor
    """[R, hidden_size] on the session's device"""
    start: torch.Tensor
    """[S+1]"""
    positions: torch.Tensor
    """[R]"""
    kv_length: torch.Tensor
    """[S]"""
    page_table: torch.Tensor
    """[S, M]"""
    shadow: ShadowTensors = ()
    """As ``StepBatch``'s, of these sequences."""

    def logits(self, session: StepFunctions, pools: Pools) -> torch.Tensor:
        """Run ``upper`` on them; returns float32 ``[R, vocab_size]`` on the CPU."""
        everyone = torch.arange(len(self.positions), dtype=torch.int32)
        return session.upper(
            self.hidden,
            everyone,
            self.start,
            self.positions,
            self.kv_length,
            self.page_table,
            pools,
            *given(self.shadow),
        )


def gather(hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Return a copy of these rows of a hidden state, on its device."""
    return hidden.index_select(0, torch.from_numpy(rows).to(hidden.device))


def starts(counts: np.ndarray) -> torch.Tensor:
    """Return where each of S sequences of ``counts`` [S] rows begins, and the end: int32 [S+1]."""
    ends = torch.zeros(len(counts) + 1, dtype=torch.int32)
    torch.cumsum(torch.from_numpy(counts), 0, dtype=torch.int32, out=ends[1:])
    return ends
