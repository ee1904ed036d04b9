"""LowRankKeyReconstruct: selected keys of a low-rank key cache, rotated to their positions (ShadowKV)."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.low_rank_key_reconstruct.reference import reference
from plugins.operator import Operator
from plugins.registration import define

SCHEMA = "(Tensor u, Tensor sv, Tensor selected_start, Tensor rows, Tensor positions, Tensor cos, Tensor sin) -> Tensor"

OPERATOR = Operator(
    name="low_rank_key_reconstruct",
    schema=SCHEMA,
    reference=reference,
    version=2,
    faces=("reference", "cpu", "triton", "onnx", "tensorrt"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(u, sv, selected_start, rows, positions, cos, sin) -> Tensor:
    return u.new_empty((rows.shape[0], sv.shape[1], sv.shape[3]))


define(OPERATOR.name, SCHEMA, _fake)


def low_rank_key_reconstruct(
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
    return torch.ops.kvforge.low_rank_key_reconstruct(u, sv, selected_start, rows, positions, cos, sin)
