"""RopePagedKvWrite: rotate K by its position and write K and V to their slots in the paged pools."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.operator import Operator
from plugins.registration import define
from plugins.rope_paged_kv_write.reference import reference

SCHEMA = "(Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor slot_mapping, Tensor(a!) k_pool, Tensor(b!) v_pool) -> ()"

OPERATOR = Operator(
    name="rope_paged_kv_write",
    schema=SCHEMA,
    reference=reference,
    version=1,
    faces=("reference", "cpu"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(k, v, cos, sin, slot_mapping, k_pool, v_pool) -> None:
    return None


define(OPERATOR.name, SCHEMA, _fake)


def rope_paged_kv_write(
    k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, k_pool: Tensor, v_pool: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes T tokens into the pools, in place, and returns the same two pools (SSA style).

    k, v: [T, kv_heads, head_dim], any float dtype, strided views allowed; k not yet rotated. cos, sin:
    [T, head_dim/2] float32, element i of a head pairs with i + head_dim/2. slot_mapping: [T] int32, page *
    page_size + offset, negative = the token is not written. k_pool, v_pool: [pages, page_size, kv_heads,
    head_dim] bfloat16 or float32; the rotation is computed in float32 and cast on write.
    Raises RuntimeError on a wrong shape or dtype and on a slot outside the pools, before any write.
    """
    torch.ops.kvforge.rope_paged_kv_write(k, v, cos, sin, slot_mapping, k_pool, v_pool)
    return k_pool, v_pool
