"""Random cases of mamba2_scan, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import bits_differ, values_differ
from plugins.cases import DTYPES, poison
from plugins.short_conv.cases import random_steps

HEADS = ((1, 1), (3, 1), (4, 2), (4, 4))
"""Of a state, and groups of them."""
DIMS = ((8, 8), (5, 7), (16, 40), (64, 32), (128, 64), (33, 65))
"""Of a state and of a head."""


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `mamba2_scan`; some heads forget at once, some never, and rows that are not read are poison.
    In one of four there are no queries."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    starts, read, write, num_rows = random_steps(rng, gen, small)
    (heads, groups), (state_dim, head_dim) = rng.choice(HEADS), rng.choice(DIMS[:3] if small else DIMS)
    dtype, tokens = rng.choice(dtypes), int(starts[-1])
    has_queries = rng.random() < 0.75
    columns = heads * head_dim + (2 if has_queries else 1) * groups * state_dim
    wide = torch.randn(tokens, columns + 3, generator=gen).to(dtype) * rng.choice((0.1, 1.0))
    xbc = wide[:, 3:] if rng.random() < 0.5 else wide[:, :columns].contiguous()
    steps = 3 * torch.randn(tokens, heads, generator=gen) + rng.choice((0.0, 22.0))
    decay_log, step_bias = 2 * torch.randn(heads, generator=gen) - 1, torch.randn(heads, generator=gen)
    pool = poison((num_rows, heads, state_dim, head_dim), torch.float32)
    kept = [row for row in read.tolist() if row >= 0]
    pool[kept] = torch.randn(len(kept), heads, state_dim, head_dim, generator=gen)
    skip = torch.randn(heads, generator=gen)
    return xbc, steps, decay_log, step_bias, skip, starts, read, write, pool, has_queries


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Each token adds a rounding to what its state has of the tokens before it; a result is a sum over the state.

    Where that nearly vanishes it still has the rounding of one with values or states of the usual size.
    """
    state_dim, longest = args[8].shape[2], int(args[5].diff().max())
    terms = state_dim + 3 * max(longest, 1)
    is_none = bits_differ(got[1].isnan(), want[1].isnan())
    states_differ = values_differ(got[1].nan_to_num(0), want[1].nan_to_num(0), terms)
    return is_none or values_differ(got[0], want[0], terms) or states_differ
