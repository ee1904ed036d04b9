"""LandmarkSelect: which chunks of a prompt a decode step attends to, by their mean keys (ShadowKV)."""

from typing import Any

import torch
from torch import Tensor

from plugins.landmark_select.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define, define_schema, writes_are_functional


def _fake(landmarks: Tensor, table: Tensor, num_chunks: Tensor, max_selected: int, **_: Any) -> Tensor:
    return table.new_empty((num_chunks.shape[0], landmarks.shape[2], max_selected))


_VARIANTS = Variants(("portable", "avx2", "avx512", "avx512_bf16"))
OPERATOR = define(
    Operator(reference, version=1, variants={"cpu_kernel.cpp": _VARIANTS}),
    _fake,
)

SCORES, CHOOSE = "landmark_select_scores_functional", "landmark_select_choose_functional"
"""The operator in the two steps that its kernels are, which graphs are traced from; nothing runs them."""

define_schema(
    SCORES,
    "(Tensor q, Tensor landmarks, Tensor is_outlier, Tensor query_start, Tensor table, Tensor num_chunks, float scale)"
    " -> Tensor",
    lambda q, landmarks, is_outlier, query_start, table, num_chunks, scale: q.new_empty(
        (num_chunks.shape[0], q.shape[1], table.shape[1] * landmarks.shape[1]), dtype=torch.float32
    ),
)
define_schema(
    CHOOSE,
    "(Tensor scores, Tensor num_chunks, Tensor num_selected, int kv_heads, int max_selected) -> Tensor",
    lambda scores, num_chunks, num_selected, kv_heads, max_selected: num_chunks.new_empty(
        (num_chunks.shape[0], kv_heads, max_selected)
    ),
)


def landmark_select(*args: Any, **named: Any) -> Tensor:
    """The chunks that each sequence attends to, as `plugins.landmark_select.reference` defines them."""
    if not writes_are_functional():
        return OPERATOR.call(*args, **named)
    given = OPERATOR.bind(*args, **named)
    scores = getattr(torch.ops.kvforge, SCORES)(*(given[name] for name in (*OPERATOR.tensors[:-1], "scale")))
    counts = (given["num_chunks"], given["num_selected"])
    chosen: Tensor = getattr(torch.ops.kvforge, CHOOSE)(
        scores, *counts, given["landmarks"].shape[2], given["max_selected"]
    )
    return chosen
