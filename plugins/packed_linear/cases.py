"""Random cases of packed_linear, and the judge of a result."""

import random

import torch
from torch import Tensor

from plugins.agreement import values_differ
from plugins.packed_linear.packing import INT4, pack


def random_case(seed: int, *, small: bool = False) -> tuple:
    """Arguments of `packed_linear`: odd depths, outputs that fill no panel, rows that may be strided."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).bfloat16()

    most = 60 if small else 400
    rows = rng.choice((0, 1, 2, rng.randint(3, 20), rng.randint(3, most)))
    depth = rng.choice((1, 2, rng.randint(3, 130), rng.randint(3, 200 if small else 1400)))
    outputs = rng.choice((1, 64, 65, rng.randint(2, 200)))
    gated, float32_out = rng.random() < 0.4, rng.random() < 0.5
    packed_rows = 2 * outputs if gated else outputs
    weight = torch.randn(packed_rows, depth, generator=gen) * depth**-0.5
    kind = (torch.bfloat16, torch.int8, *INT4)[seed % 5]
    weight, scales = pack(weight.bfloat16(), kind, gated)
    x = normal(rows, depth + 3)[:, 3:] if rng.random() < 0.5 else normal(rows, depth)
    if rows and rng.random() < 0.3:  # a row of zeros has a scale too
        x[rng.randrange(rows)] = 0
    bias = normal(packed_rows) if rng.random() < 0.5 else None
    norm = normal(depth) if rng.random() < 0.5 else None
    residual = normal(rows, outputs + 5)[:, :outputs] if rng.random() < 0.5 else None
    rotated = scales is not None and rng.random() < 0.4
    return x, weight, scales, bias, norm, residual, outputs, 1e-5, gated, float32_out, rotated


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """An output sums as many products as the layer is deep. With a norm, a normed value may be rounded to bfloat16 the
    other way, so float32 results are compared as bfloat16."""
    if args[4] is not None:
        got, want = [got[0].bfloat16()], [want[0].bfloat16()]
    return values_differ(got[0], want[0], terms=args[0].shape[1])
