"""The definition of LowRankKeyReconstruct in plain torch."""

import itertools

import torch
from torch import Tensor


def reference(
    u: Tensor, sv: Tensor, selected_start: Tensor, rows: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Keys K = RoPE(U[row] SV) of N packed selections (ShadowKV, arXiv 2410.21465, section 4.1).

    u: [num_rows, rank] float32 or bfloat16, the left factors of all sequences. sv: [S, kv_heads, rank, head_dim]
    in u's dtype. selected_start: [S+1] int32 from 0 to N, the selections of each sequence. rows, positions:
    [N, kv_heads] int32, the row of u and the position of each key; a negative row selects nothing: its position is
    not read and its key is anything. cos, sin: [num_positions, head_dim/2] float32, element i of a head pairs
    with i + head_dim/2. Result: [N, kv_heads, head_dim] in u.dtype; product and rotation in float32.
    Raises RuntimeError on a wrong shape or dtype, and on a row or position outside its table.
    """
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
