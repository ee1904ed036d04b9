"""LandmarkSelect: which chunks of a prompt a decode step attends to, by their mean keys (ShadowKV)."""

from typing import Any

from torch import Tensor

from plugins.landmark_select.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define


def _fake(landmarks: Tensor, table: Tensor, num_chunks: Tensor, max_selected: int, **_: Any) -> Tensor:
    return table.new_empty((num_chunks.shape[0], landmarks.shape[2], max_selected))


_VARIANTS = Variants(("portable", "avx2", "avx512", "avx512_bf16"))
OPERATOR = define(
    Operator(reference, version=1, variants={"cpu_kernel.cpp": _VARIANTS}),
    _fake,
)
landmark_select = OPERATOR.call
