"""PackedLinear: a linear layer on weights packed for the CPU, with what stands around it in a transformer fused."""

from typing import Any

import torch
from torch import Tensor

from plugins.operator import ISAS, TILE_ISAS, Operator, Variants
from plugins.packed_linear.packing import PANEL, pack, rotated_rows
from plugins.packed_linear.reference import reference
from plugins.registration import define

__all__ = ["OPERATOR", "PANEL", "pack", "packed_linear", "reference", "rotated_rows"]

_VNNI = ("avx512_vnni", "avx512_bf16")


def _fake(x: Tensor, out_features: int, float32_out: bool, **_: Any) -> Tensor:
    return x.new_empty((x.shape[0], out_features), dtype=torch.float32 if float32_out else x.dtype)


OPERATOR = define(
    Operator(
        reference,
        version=3,
        graphs=("lower", "upper", "early_exit"),
        variants={
            "cpu_bf16.cpp": Variants(("avx512_bf16",)),
            "cpu_bf16_fma.cpp": Variants(),
            "cpu_int8_vnni.cpp": Variants(_VNNI),
            "cpu_int8_madd.cpp": Variants(),
            "cpu_int4.cpp": Variants(ISAS, ("-ffp-contract=off",)),
            "cpu_int4_tiles.cpp": Variants(TILE_ISAS, ("-ffp-contract=off",)),
            "cpu_tiles.cpp": Variants(TILE_ISAS),
            "cpu_finish.cpp": Variants(("portable", "avx2")),
            "cpu_finish_avx512.cpp": Variants(("avx512", *_VNNI)),
        },
    ),
    _fake,
)


def packed_linear(
    x: Tensor,
    weight: Tensor,
    out_features: int,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    float32_out: bool = False,
    rotated: bool = False,
) -> Tensor:
    """Linear layer y = norm(x) W^T + bias of T tokens, gated or added to a residual: [T, out_features].

    x: [T, K] bfloat16, K contiguous, rows may be strided. weight and scales come from `pack`; scales float32
    [2, N padded] belong to int8 weights, [1, N padded] to int4 ones. norm: [K] bfloat16, the weight of an RMSNorm with
    `eps` applied to x first, rounded to bfloat16 twice as model_defs.layers.RMSNorm does. bias: bfloat16, one value for
    each row of the weight that was packed. gated: these rows are [gate; up], the result is silu(gate) * up and
    out_features the number of up rows. residual: [T, out_features] bfloat16, added last.

    Sums are float32; int8 and int4 weights are multiplied with activations quantized row by row (scale max|x| / 127,
    symmetric, half to even). With `rotated`, which is for them alone, a row is first multiplied with a Hadamard matrix,
    block by block (`rotated_rows`), and rounded to bfloat16; the weight that was packed is rotated
    alike, so that outliers of x are spread and the product stays (QuaRot, arXiv 2404.00456). Products are summed in
    int32 and then scaled: all of an output at once with int8 and with int4 in steps, by which its groups are multiplied
    before; group by group of the depth with int4 that has scales, whose scaled groups are added from the first on. All
    that follows is float32, rounded once to bfloat16, or not at all with float32_out. A row of the result depends, in
    all its bits, on its own row of x alone.
    Raises RuntimeError on a wrong shape, dtype or stride, and on K beyond 65536 with int8 and with int4 in steps.
    """
    return OPERATOR.call(x, weight, scales, bias, norm, residual, out_features, eps, gated, float32_out, rotated)
