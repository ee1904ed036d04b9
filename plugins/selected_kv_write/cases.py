"""Random cases of selected_kv_write, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.cases import DTYPES, HEAD_DIMS, SMALL_HEAD_DIMS
from plugins.judge import bits_differ, values_differ


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `selected_kv_write`: lists of 0 to all chunks, scattered pages, sequences without a slot; what
    belongs to no chunk of a list is NaN or out of range."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, kv_heads = rng.choice(dtypes), rng.randint(1, 3 if small else 8)
    head_dim, rank = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS), rng.choice((1, 7, 16, 33, 160))
    sequences, chunk_size = rng.randint(0, 3 if small else 5), rng.choice((1, 2, 8))
    page_size, places = chunk_size * rng.choice((1, 2, 4)), rng.choice((0, 1, rng.randint(1, 6 if small else 24)))
    chunks, slots = places + rng.randint(1, 9), sequences + rng.randint(1, 2)
    widths = [max(1, -(-n * chunk_size // page_size)) for n in (chunks, places)]
    num_pages = [sequences * width + rng.randint(1, 3) for width in widths]
    tables = [
        torch.randperm(pages, generator=gen)[: sequences * width].view(sequences, width).int()
        for pages, width in zip(num_pages, widths, strict=True)
    ]
    u = torch.full((num_pages[0], page_size, rank), float("nan"))
    host_v = torch.full((num_pages[0], page_size, kv_heads, head_dim), float("nan"))
    missed, taken = (torch.full((sequences, kv_heads, places), -rng.randint(1, 3)) for _ in range(2))
    slot = torch.randperm(slots, generator=gen)[:sequences]
    slot[torch.rand(sequences, generator=gen) < 0.2] = -rng.randint(1, 3)
    for s in range(sequences):
        most = rng.choice((0, places, rng.randint(0, places)))
        for head in range(kv_heads):
            count = rng.randint(0, most)
            missed[s, head, :count] = torch.randperm(chunks, generator=gen)[:count].sort().values
            taken[s, head, :count] = torch.randperm(places, generator=gen)[:count].sort().values
            row = (missed[s, head, :count, None] * chunk_size + torch.arange(chunk_size)).flatten()
            page, offset = tables[0][s, row // page_size].long(), row % page_size
            u[page, offset] = torch.randn(len(row), rank, generator=gen)
            host_v[page, offset, head] = torch.randn(len(row), head_dim, generator=gen)
    sv = torch.full((slots, kv_heads, rank, head_dim), float("nan"))
    used = slot[slot >= 0]
    sv[used] = torch.randn(len(used), *sv.shape[1:], generator=gen) / rank**0.5
    angle = torch.rand(chunks * chunk_size, head_dim // 2, generator=gen) * 7
    pools = [torch.randn(num_pages[1], page_size, kv_heads, head_dim, generator=gen).to(dtype) for _ in range(2)]
    factors = (x.to(dtype) for x in (u, sv, host_v))
    lists = (x.int() for x in (slot, missed, taken))
    return *factors, *lists, *tables, angle.cos(), angle.sin(), chunk_size, *pools


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Keys are computed, each from as many products as the rank; values are copied, and all else is left alone."""
    before = args[-2]
    left = (want[0] == before).all(-1)
    wrong = bits_differ(got[0][left], before[left]) or bits_differ(got[1], want[1])
    return wrong or values_differ(got[0], want[0], terms=args[0].shape[2])
