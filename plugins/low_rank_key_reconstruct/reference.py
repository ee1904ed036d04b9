"""The definition of LowRankKeyReconstruct in plain torch."""

import itertools

import torch
from torch import Tensor


def reference(
    u: Tensor, sv: Tensor, selected_start: Tensor, rows: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Same arguments and result as `plugins.low_rank_key_reconstruct`."""
    num_kv_heads, _, head_dim = sv.shape[1:]
    out = torch.zeros(rows.shape[0], num_kv_heads, head_dim, dtype=u.dtype)
    starts = selected_start.tolist()
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        for head in range(num_kv_heads):
            present = rows[begin:end, head] >= 0
            row, position = rows[begin:end, head][present].long(), positions[begin:end, head][present].long()
            key = u[row].float() @ sv[s, head].float()
            first, second = key.chunk(2, dim=-1)
            c, d = cos[position], sin[position]
            rotated = torch.cat((first * c - second * d, second * c + first * d), dim=-1)
            out[begin:end, head][present] = rotated.to(u.dtype)
    return out
