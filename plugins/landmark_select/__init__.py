"""LandmarkSelect: which chunks of a prompt a decode step attends to, by their mean keys (ShadowKV)."""

from pathlib import Path

import torch
from torch import Tensor

from plugins.landmark_select.reference import reference
from plugins.operator import Operator
from plugins.registration import define

SCHEMA = (
    "(Tensor q, Tensor landmarks, Tensor is_outlier, Tensor query_start, Tensor table, Tensor num_chunks, "
    "Tensor num_selected, float scale, int max_selected) -> Tensor"
)

OPERATOR = Operator(
    name="landmark_select",
    schema=SCHEMA,
    reference=reference,
    version=1,
    faces=("reference", "cpu", "triton", "onnx", "tensorrt"),
    sources=tuple(sorted(Path(__file__).parent.glob("*.cpp"))),
)


def _fake(q, landmarks, is_outlier, query_start, table, num_chunks, num_selected, scale, max_selected) -> Tensor:
    return table.new_empty((num_chunks.shape[0], landmarks.shape[2], max_selected))


define(OPERATOR.name, SCHEMA, _fake)


def landmark_select(
    q: Tensor,
    landmarks: Tensor,
    is_outlier: Tensor,
    query_start: Tensor,
    table: Tensor,
    num_chunks: Tensor,
    num_selected: Tensor,
    scale: float,
    max_selected: int,
) -> Tensor:
    """The chunks that each of S sequences attends to (ShadowKV, arXiv 2410.21465, section 4.1 and algorithm 2).

    q: [T, heads, head_dim] float32 or bfloat16, rotated; a sequence's query is its last row. landmarks:
    [pages, chunks_per_page, kv_heads, head_dim] in q's dtype. is_outlier: [pages, chunks_per_page, kv_heads]
    uint8, not 0 = never selected. query_start: [S+1] int32 from 0 to T. table: [S, Ms] int32, the pages of each
    sequence's chunks; chunk m is chunk m % chunks_per_page of page table[s, m // chunks_per_page]. num_chunks,
    num_selected: [S] int32. Result: [S, kv_heads, max_selected] int32: chunks in ascending order, then -1.

    A chunk's score is the largest over the query heads of its KV head of softmax(scale * q . landmark), taken
    over the chunks that are not outliers, in float32 (compared as logarithms, which do not underflow; one that is
    not a number counts as the lowest). The num_selected chunks of the highest scores are selected, the lower of
    equals first; all where there are fewer; none for a sequence that has no chunks or no query.
    Raises RuntimeError on a wrong shape or dtype, and on a count or a page outside its range.
    """
    return torch.ops.kvforge.landmark_select(
        q, landmarks, is_outlier, query_start, table, num_chunks, num_selected, scale, max_selected
    )
