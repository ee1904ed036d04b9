"""LowRankKeyReconstruct: selected keys of a low-rank key cache, rotated to their positions (ShadowKV)."""

from typing import Any

from torch import Tensor

from plugins.low_rank_key_reconstruct.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define


def _fake(u: Tensor, sv: Tensor, rows: Tensor, **_: Any) -> Tensor:
    return u.new_empty((rows.shape[0], sv.shape[1], sv.shape[3]))


_VARIANTS = Variants(("portable", "avx2", "avx512", "avx512_bf16"))
OPERATOR = define(
    Operator(reference, version=2, variants={"cpu_kernel.cpp": _VARIANTS}),
    _fake,
)
low_rank_key_reconstruct = OPERATOR.call
