"""Random cases of gated_delta_rule, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import bits_differ, values_differ
from plugins.cases import DTYPES, poison
from plugins.short_conv.cases import random_steps

HEADS = ((1, 1), (1, 3), (2, 4), (4, 4))
"""Of keys and of values."""
DIMS = ((8, 8), (5, 7), (16, 40), (64, 32), (128, 128), (33, 65))
"""Of a key and of a value."""


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `gated_delta_rule`; some heads forget at once, some never, and rows that are not read are poison.
    In one of four there are no queries; in half of them decays are by key channel."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    starts, read, write, num_rows = random_steps(rng, gen, small)
    (key_heads, heads), (key_dim, value_dim) = rng.choice(HEADS), rng.choice(DIMS[:3] if small else DIMS)
    dtype, tokens = rng.choice(dtypes), int(starts[-1])
    has_queries = rng.random() < 0.75
    columns = (2 if has_queries else 1) * key_heads * key_dim + heads * value_dim
    wide = torch.randn(tokens, columns + 3, generator=gen).to(dtype) * rng.choice((0.1, 1.0))
    qkv = wide[:, 3:] if rng.random() < 0.5 else wide[:, :columns].contiguous()
    if tokens and rng.random() < 0.3:
        qkv[rng.randrange(tokens)] = 0
    decays = heads * rng.choice((1, key_dim))
    gates = 3 * torch.randn(tokens, heads + decays, generator=gen)
    if tokens and rng.random() < 0.3:  # neither forgets nor takes anything up, or forgets all
        gates[rng.randrange(tokens)] = rng.choice((-torch.inf, 100.0))
    decay_log, decay_bias = 2 * torch.randn(heads, generator=gen) - 1, torch.randn(decays, generator=gen)
    pool = poison((num_rows, heads, key_dim, value_dim), torch.float32)
    kept = [row for row in read.tolist() if row >= 0]
    pool[kept] = torch.randn(len(kept), heads, key_dim, value_dim, generator=gen)
    return qkv, gates, decay_log, decay_bias, starts, read, write, pool, has_queries


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Each token adds the rounding of three sums over keys to what its state has of the tokens before it.

    A result is a product with q, of size dk^-0.5: where it is small because q is nearly orthogonal to the keys, it
    still has the rounding of one with values or states of the usual size.
    """
    qkv, pool = args[0], args[7]
    key_dim, longest = pool.shape[2], int(args[4].diff().max())
    values = qkv[:, qkv.shape[1] - pool.shape[1] * pool.shape[3] :]
    sizes = [x.float().nan_to_num(0).abs().max() for x in (values, pool) if x.numel()]
    usual = torch.stack(sizes).max().view(1) * key_dim**-0.5
    terms = 3 * key_dim * max(longest, 1)
    one, other = (torch.cat((x.flatten(), usual.to(x.dtype))) for x in (got[0], want[0]))
    is_none = bits_differ(got[1].isnan(), want[1].isnan())
    states_differ = values_differ(got[1].nan_to_num(0), want[1].nan_to_num(0), terms)
    return is_none or values_differ(one, other, terms) or states_differ
