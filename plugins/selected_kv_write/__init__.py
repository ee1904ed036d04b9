"""SelectedKvWrite: rebuilt keys and values from host memory go to their slots in the paged pools (ShadowKV)."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.operator import Operator
from plugins.registration import define
from plugins.selected_kv_write.reference import reference

SCHEMA = "(Tensor keys, Tensor host_v, Tensor rows, Tensor targets, Tensor(a!) k_pool, Tensor(b!) v_pool) -> ()"

OPERATOR = Operator(
    name="selected_kv_write",
    schema=SCHEMA,
    reference=reference,
    version=1,
    faces=("reference", "cpu", "triton"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(keys, host_v, rows, targets, k_pool, v_pool) -> None:
    return None


define(OPERATOR.name, SCHEMA, _fake)


def selected_kv_write(
    keys: Tensor, host_v: Tensor, rows: Tensor, targets: Tensor, k_pool: Tensor, v_pool: Tensor
) -> tuple[Tensor, Tensor]:
    """Copies N selected tokens into the pools, in place, and returns the pools (ShadowKV, arXiv 2410.21465, section
    4.2): k_pool[targets[n, h], h] = keys[n, h] and v_pool[targets[n, h], h] = host_v[rows[n, h], h].

    keys: [N, kv_heads, head_dim], already rotated. host_v: [shadow_pages, page_size, kv_heads, head_dim], for CUDA
    also in pinned host memory. rows, targets: [N, kv_heads] int32, page * page_size + offset in host_v and in the
    pools; a negative target: nothing is read or written. k_pool, v_pool: [pages, page_size, kv_heads, head_dim].
    All of one dtype, float32 or bfloat16. Targets of a head are distinct.
    Raises RuntimeError on a wrong shape or dtype, and on a row or a target outside its pool, before any write.
    """
    torch.ops.kvforge.selected_kv_write(keys, host_v, rows, targets, k_pool, v_pool)
    return k_pool, v_pool
