"""Random cases of short_conv, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import bits_differ, values_differ
from plugins.cases import DTYPES, poison

CHANNELS = (1, 24, 250, 256, 515)


def random_steps(rng: random.Random, gen: torch.Generator, small: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    """Where sequences begin, the rows that they read and that tokens write, and the number of rows; some sequences have
    no token, some go on in the row that they came from, and no two have one."""
    lengths = [rng.choice((0, 1, 2, rng.randint(1, 8 if small else 40))) for _ in range(rng.randint(1, 5))]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(starts[-1])
    free = torch.randperm(tokens + 2 * len(lengths) + 1, generator=gen).tolist()
    num_rows = len(free)
    read = [free.pop() if rng.random() < 0.6 else -rng.randint(1, 3) for _ in lengths]
    write = [-1] * tokens
    for sequence, row in enumerate(read):
        own = [row] if row >= 0 and rng.random() < 0.5 else []
        for token in range(int(starts[sequence]), int(starts[sequence + 1])):
            if rng.random() < 0.4:
                write[token] = own.pop() if own else free.pop()
    return starts.int(), torch.tensor(read).int(), torch.tensor(write).int(), num_rows


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `short_conv`; x may be a strided view, and rows that are not read are poison."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    starts, read, write, num_rows = random_steps(rng, gen, small)
    channels, width = rng.choice(CHANNELS[:2] if small else CHANNELS), rng.choice((2, 3, 4, 7))
    dtype, tokens = rng.choice(dtypes), int(starts[-1])
    wide = torch.randn(tokens, channels + 5, generator=gen).to(dtype) * rng.choice((0.1, 1.0, 30.0))
    x = wide[:, :channels] if rng.random() < 0.5 else wide[:, 5:].contiguous()
    weight = torch.randn(width, channels, generator=gen).to(dtype)
    pool = poison((num_rows, width - 1, channels), dtype)
    kept = [row for row in read.tolist() if row >= 0]
    pool[kept] = torch.randn(len(kept), width - 1, channels, generator=gen).to(dtype)
    bias = torch.randn(channels, generator=gen).to(dtype) if rng.random() < 0.5 else None
    return x, weight, starts, read, write, pool, rng.random() < 0.5, bias


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Sums of a few products and SiLU of them; states are inputs, bit for bit."""
    return values_differ(got[0], want[0], terms=len(args[1])) or bits_differ(got[1], want[1])
