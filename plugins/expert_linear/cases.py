"""Random cases of expert_linear, and the judge of a result."""

import random

import torch
from torch import Tensor

from plugins.agreement import values_differ
from plugins.expert_linear.packing import pack_experts
from plugins.packed_linear.packing import INT4


def random_case(seed: int, *, small: bool = False) -> tuple:
    """Arguments of `expert_linear`: no token, experts without one, all tokens to one expert, odd depths; x for a token
    or for each of its experts, with rows that may be strided."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens = rng.choice((0, 1, 2, rng.randint(3, 20), rng.randint(3, 30 if small else 150)))
    experts = rng.choice((1, 2, rng.randint(3, 9)))
    num_active = rng.randint(1, experts)
    depth = rng.choice((1, 2, rng.randint(3, 130), rng.randint(3, 150 if small else 700)))
    outputs = rng.choice((1, 64, 65, rng.randint(2, 200)))
    gated, float32_out, is_wide = rng.random() < 0.4, rng.random() < 0.5, rng.random() < 0.5
    weight = torch.randn(experts, 2 * outputs if gated else outputs, depth, generator=gen) * depth**-0.5
    kind = (torch.bfloat16, torch.int8, *INT4, None, None)[seed % 7]
    dtype = torch.float32 if seed % 7 == 5 else torch.bfloat16
    scales = None
    if kind is not None:
        weight, scales = pack_experts(weight.bfloat16(), kind, gated)
    x = torch.randn(tokens, *((num_active,) if is_wide else ()), depth + 3, generator=gen).to(dtype)
    x = x[..., 3:] if rng.random() < 0.5 else x[..., 3:].contiguous()
    ids = torch.stack([torch.randperm(experts, generator=gen)[:num_active] for _ in range(tokens)] or [torch.empty(0)])
    if rng.random() < 0.2:
        ids = torch.full_like(ids, experts - 1)
    ids = ids.int().view(tokens, num_active)
    return x, weight.to(dtype) if kind is None else weight, scales, ids, outputs, gated, float32_out


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """An output sums as many products as the layer is deep. Torch rounds bfloat16 layers that are not packed before the
    gate as well, so these are compared as bfloat16, and twice as far: a product of two that were rounded."""
    x, weight = args[0], args[1]
    if weight.dim() == 3 and x.dtype == torch.bfloat16:
        got, want = [got[0].bfloat16()], [want[0].bfloat16()]
    return values_differ(got[0], want[0], terms=x.shape[-1])
