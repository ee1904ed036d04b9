"""GroupedAttention: attention to a query's own page exactly, and to sealed pages before it."""

from typing import Any

from torch import Tensor

from plugins.grouped_attention.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define


def _fake(q: Tensor, **_: Any) -> Tensor:
    return q.new_empty(q.shape)


OPERATOR = define(
    Operator(
        reference, version=2, variants={"cpu_kernel.cpp": Variants(("portable", "avx2", "avx512", "avx512_bf16"))}
    ),
    _fake,
)
grouped_attention = OPERATOR.call
