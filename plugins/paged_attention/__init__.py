"""PagedAttention: causal attention of packed queries over a paged KV cache."""

from typing import Any

from torch import Tensor

from plugins.operator import TILE_ISAS, Operator, Variants
from plugins.paged_attention.reference import reference
from plugins.registration import define

_AVX512_BF16 = Variants(("avx512_bf16",))


def _fake(q: Tensor, **_: Any) -> Tensor:
    return q.new_empty(q.shape)


OPERATOR = define(
    Operator(
        reference,
        version=5,
        graphs=("lower", "upper"),
        variants={
            "cpu_bf16_tile.cpp": _AVX512_BF16,
            "cpu_bf16_direct.cpp": _AVX512_BF16,
            "cpu_bf16.cpp": _AVX512_BF16,
            "cpu_vnni.cpp": _AVX512_BF16,
            **dict.fromkeys(("cpu_tiles.cpp", "cpu_tiles_direct.cpp"), Variants(TILE_ISAS)),
            **dict.fromkeys(
                ("cpu_fp32.cpp", "cpu_fp32_direct.cpp", "cpu_fp32_tile.cpp", "cpu_queries.cpp"), Variants()
            ),
        },
    ),
    _fake,
)
paged_attention = OPERATOR.call
