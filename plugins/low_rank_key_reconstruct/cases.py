"""Random cases of low_rank_key_reconstruct, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.cases import DTYPES, HEAD_DIMS, SMALL_HEAD_DIMS
from plugins.judge import values_differ


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple[Tensor, ...]:
    """Arguments of `low_rank_key_reconstruct`: ragged selections, some empty, rows repeated and out of order."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice(dtypes)
    sequences, kv_heads = rng.randint(0, 4), rng.randint(1, 2 if small else 8)
    head_dim = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS)
    rank = rng.choice((1, 8, 16, 33) if small else (1, 12, 64, 160, 256))
    most = 12 if small else 150
    counts = [rng.choice((0, 1, rng.randint(1, most))) for _ in range(sequences)]
    num_rows, num_positions = rng.randint(1, 400), rng.randint(1, 400)
    u = torch.randn(num_rows, rank, generator=gen).to(dtype)
    sv = torch.randn(sequences, kv_heads, rank, head_dim, generator=gen).to(dtype)
    total = sum(counts)
    rows = torch.randint(0, num_rows, (total, kv_heads), generator=gen)
    positions = torch.randint(0, num_positions, (total, kv_heads), generator=gen)
    nothing = torch.rand(total, kv_heads, generator=gen) < rng.choice((0.0, 0.2))
    rows[nothing], positions[nothing] = -rng.randint(1, 5), rng.choice((-7, 2**31 - 1))
    angle = torch.rand(num_positions, head_dim // 2, generator=gen) * 1000
    starts = torch.tensor([0, *counts]).cumsum(0)
    return u, sv, starts.int(), rows.int(), positions.int(), angle.cos(), angle.sin()


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """A key sums as many products as the rank; one that is not selected is anything."""
    selected = args[3] >= 0
    return values_differ(got[0][selected], want[0][selected], terms=args[0].shape[1])
