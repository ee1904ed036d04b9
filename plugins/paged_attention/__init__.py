"""PagedAttention: causal attention of packed queries over a paged KV cache."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.operator import Operator
from plugins.paged_attention.reference import reference
from plugins.registration import define

SCHEMA = (
    "(Tensor q, Tensor k_pool, Tensor v_pool, Tensor query_start, Tensor kv_length, Tensor page_table, "
    "float scale, int window, Tensor? k_scales=None, Tensor? v_scales=None, float k_scale=1.0, float v_scale=1.0) "
    "-> Tensor"
)

OPERATOR = Operator(
    name="paged_attention",
    schema=SCHEMA,
    reference=reference,
    version=2,
    faces=("reference", "cpu", "triton", "onnx", "tensorrt"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(
    q,
    k_pool,
    v_pool,
    query_start,
    kv_length,
    page_table,
    scale,
    window,
    k_scales=None,
    v_scales=None,
    k_scale=1.0,
    v_scale=1.0,
) -> Tensor:
    return q.new_empty(q.shape)


define(OPERATOR.name, SCHEMA, _fake)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    query_start: Tensor,
    kv_length: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Attention of T packed queries, causal from the right, over the pages of their sequences.

    q: [T, heads, head_dim] already rotated, heads a multiple of kv_heads; k_pool, v_pool: [pages, page_size,
    kv_heads, head_dim] bfloat16, float32, float8_e4m3fn or int8. query_start: [S+1] int32 from 0 to T;
    kv_length: [S] int32; page_table: [S, M] int32 physical pages, entries that no query needs are arbitrary.
    Sequence s has n = query_start[s+1] - query_start[s] queries (0 allowed), the last n of its kv_length[s]
    positions; the query at position p attends keys 0..p, with window > 0 keys max(0, p-window+1)..p. `scale`
    multiplies the scores. Result: [T, heads, head_dim] in q.dtype, contiguous, softmax and sums in float32.
    The value of an 8-bit element is the stored number times k_scales[page, offset, head] (float32, [pages,
    page_size, kv_heads]), or times the float k_scale where there are none; likewise V.
    A sequence's result does not depend, in any bit, on the other sequences or on which pages it has.
    Raises RuntimeError on a wrong shape or dtype, and on a needed page outside the pools.
    """
    return torch.ops.kvforge.paged_attention(
        q,
        k_pool,
        v_pool,
        query_start,
        kv_length,
        page_table,
        scale,
        window,
        k_scales,
        v_scales,
        k_scale,
        v_scale,
    )
