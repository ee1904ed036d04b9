"""LowRankKeyReconstruct: keys of listed chunks of a low-rank key cache, rotated to their positions (ShadowKV)."""

from typing import Any

from torch import Tensor

from plugins.low_rank_key_reconstruct.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define


def _fake(u: Tensor, sv: Tensor, chunks: Tensor, chunk_size: int, **_: Any) -> Tensor:
    sequences, kv_heads, count = chunks.shape
    return u.new_empty((sequences, kv_heads, count * chunk_size, sv.shape[3]))


_VARIANTS = Variants(("portable", "avx2", "avx512", "avx512_bf16"))
OPERATOR = define(
    Operator(reference, version=3, variants={"cpu_kernel.cpp": _VARIANTS}),
    _fake,
)
low_rank_key_reconstruct = OPERATOR.call
