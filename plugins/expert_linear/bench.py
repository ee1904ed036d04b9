"""Benchmarks of expert_linear."""

import functools
import itertools

import torch
import torch.nn.functional as F

from plugins.benchmark import Benchmark, Benchmarks
from plugins.expert_linear import expert_linear
from plugins.packed_linear.packing import IN_STEPS, pack

EXPERTS, ACTIVE = 64, 8


def linear(tokens: int, outputs: int, depth: int, gated: bool, dtype: torch.dtype) -> Benchmark:
    """Beside torch's linear layers in bfloat16 of one expert after the other, each on as many rows. The floor is the
    greater of the bytes of the experts that are chosen and, with bfloat16 weights, the products. Other experts are
    chosen at each run, so that they come from memory."""
    one = pack(torch.randn(outputs * (2 if gated else 1), depth).bfloat16(), dtype, gated)
    weight = one[0].expand(EXPERTS, *one[0].shape).contiguous()
    scales = None if one[1] is None else one[1].expand(EXPERTS, *one[1].shape).contiguous()
    x = torch.randn(tokens, *(() if gated else (ACTIVE,)), depth).bfloat16()
    choices = [torch.stack([torch.randperm(EXPERTS)[:ACTIVE] for _ in range(tokens)]).int() for _ in range(16)]
    used = itertools.cycle(choices)
    plain = [torch.randn(outputs * (2 if gated else 1), depth).bfloat16() for _ in range(16)]
    rows = -(-tokens * ACTIVE // EXPERTS)

    def ours() -> torch.Tensor:
        return expert_linear(x, weight, next(used), outputs, scales=scales, gated=gated)

    distinct = sum(len(ids.unique()) for ids in choices) / len(choices)

    def torch_linear() -> None:
        for expert in range(round(distinct)):
            F.linear(x.flatten(0, -2)[:rows], plain[expert % len(plain)])

    flops = 2 * tokens * ACTIVE * outputs * (2 if gated else 1) * depth if dtype == torch.bfloat16 else 0
    name = str(dtype)[6:].removeprefix("u")
    case = f"{tokens} tokens, {ACTIVE} of {EXPERTS} experts {outputs}x{depth}{' gated' if gated else ''} {name} weights"
    return Benchmark(case, {"kvforge_ms": ours, "linear_ms": torch_linear}, one[0].nbytes * distinct, flops)


def benchmarks(kv_dtypes: list[str]) -> Benchmarks:
    """The cases: experts of Qwen3-30B-A3B."""
    for dtype in (torch.bfloat16, torch.int8, IN_STEPS):
        for tokens in (1, 8, 512):
            for outputs, depth, gated in ((768, 2048, True), (2048, 768, False)):
                yield "experts", functools.partial(linear, tokens, outputs, depth, gated, dtype)
