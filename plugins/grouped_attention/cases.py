"""Random cases of grouped_attention, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import values_differ
from plugins.cases import DTYPES
from plugins.seal_pages.cases import sealed_pools
from plugins.seal_pages.layout import BITS, GROUP
from plugins.seal_pages.reference import reference as seal_pages


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `grouped_attention`: prompts' chunks, decode steps and sequences without queries, with a window or
    without; what no query reads is NaN or out of range."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    page_size, kv_heads, dtype = GROUP * rng.choice((1, 2)), rng.randint(1, 2 if small else 4), rng.choice(dtypes)
    head_dim, group, sequences = GROUP * rng.choice((1, 2, 3)), rng.randint(1, 3), rng.randint(0, 3)
    lengths = [
        rng.choice((1, page_size, page_size + 1, rng.randint(1, 60 if small else 200))) for _ in range(sequences)
    ]
    counts = [rng.choice((0, 1, 1, length, rng.randint(1, length))) for length in lengths]
    columns = max((-(-length // page_size) for length in lengths), default=1) + rng.randint(0, 1)
    num_pages = sequences * columns + 2
    tables = [torch.randperm(num_pages, generator=gen)[: sequences * columns].view(sequences, columns) for _ in "se"]
    exact = [torch.full((num_pages, page_size, kv_heads, head_dim), float("nan"), dtype=dtype) for _ in "kv"]
    pools = sealed_pools(num_pages, page_size, kv_heads, head_dim, rng.choice(BITS))
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        slot = torch.arange(length)
        for x in exact:
            values = torch.randn(length, kv_heads, head_dim, generator=gen)
            x[tables[1][s, slot // page_size], slot % page_size] = values.to(dtype)
        whole = length // page_size
        pairs = torch.stack((tables[1][s, :whole], tables[0][s, :whole]), -1).int()
        seal_pages(exact[0], exact[1], pairs, pools[0], pools[1], pools[2], pools[3])
        first = (length - count) // page_size
        for x in exact:  # pages sealed before the step have no owner here
            x[tables[1][s, :first]] = float("nan")
        tables[1][s, :first] = rng.choice((-5, 10**6))
        for index, table in enumerate(tables):
            table[s, (length - 1) // page_size + index :] = rng.choice((-5, 10**6))
    q = torch.randn(sum(counts), kv_heads * group, head_dim, generator=gen).to(dtype)
    starts = torch.tensor([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0)], dtype=torch.int32)
    window = rng.choice((0, 0, rng.randint(1, 70)))
    kv_length = torch.tensor(lengths, dtype=torch.int32)
    return q, *pools, *exact, starts, kv_length, *(table.int() for table in tables), head_dim**-0.5, window


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """A result sums head_dim products for each score, and its keys."""
    return values_differ(got[0], want[0], terms=args[0].shape[2] + int(args[8].max()) if len(args[8]) else 1)
