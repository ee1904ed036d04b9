"""What graphs of an engine with ShadowKV take of a step besides what every engine's do."""

import torch
from torch import Tensor

from kvforge.engine import Manifest
from kvforge.kv_policies import ShadowKV

ShadowTensors = tuple[Tensor, ...]
"""(shadow_slot ``[S]``, shadow_table ``[S, Ms]``, num_chunks ``[S]``, num_selected ``[S]``), int32: each sequence's row
of sv and cached, -1 for none; its pages of u, landmarks, is_outlier and host_v; its chunks, 0 where it is not factored;
and how many of them are to be chosen. Or ``()``: no sequence of the step is factored."""


def has_shadow(manifest: Manifest) -> bool:
    """Whether the engine's graphs take ``ShadowTensors``."""
    return isinstance(manifest.policy, ShadowKV)


def not_factored(num_seqs: int, num_columns: int = 1) -> ShadowTensors:
    """Return the inputs of sequences of which none is factored."""
    zeros = torch.zeros(num_seqs, dtype=torch.int32)
    return zeros - 1, torch.zeros(num_seqs, num_columns, dtype=torch.int32), zeros, zeros
