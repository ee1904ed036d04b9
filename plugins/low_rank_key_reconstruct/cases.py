"""Random cases of low_rank_key_reconstruct, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import values_differ
from plugins.cases import DTYPES, HEAD_DIMS, SMALL_HEAD_DIMS


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `low_rank_key_reconstruct`: lists of 0 to all chunks, scattered pages, sequences without a slot;
    what belongs to no chunk of a list is NaN or out of range."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, kv_heads = rng.choice(dtypes), rng.randint(1, 3 if small else 8)
    head_dim, rank = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS), rng.choice((1, 7, 16, 33, 160))
    if not small:
        rank = rng.choice((rank, 12, 64, 256))
    sequences, chunk_size = rng.randint(0, 3 if small else 5), rng.choice((1, 2, 8))
    page_size, count = chunk_size * rng.choice((1, 2, 4)), rng.choice((0, 1, rng.randint(1, 6 if small else 24)))
    chunks, slots = count + rng.randint(1, 9), sequences + rng.randint(1, 2)
    width = -(-chunks * chunk_size // page_size)
    num_pages = sequences * width + rng.randint(1, 3)
    table = torch.randperm(num_pages, generator=gen)[: sequences * width].view(sequences, width)
    u = torch.full((num_pages, page_size, rank), float("nan"))
    missed = torch.full((sequences, kv_heads, count), -rng.randint(1, 3))
    slot = torch.randperm(slots, generator=gen)[:sequences]
    slot[torch.rand(sequences, generator=gen) < 0.2] = -rng.randint(1, 3)
    for s in range(sequences):
        most = rng.choice((0, count, rng.randint(0, count)))
        for head in range(kv_heads):
            listed = rng.randint(0, most)
            missed[s, head, :listed] = torch.randperm(chunks, generator=gen)[:listed].sort().values
            page, offset = rows_of(missed[s, head, :listed], table[s], chunk_size, page_size)
            u[page, offset] = torch.randn(len(page), rank, generator=gen)
    sv = torch.full((slots, kv_heads, rank, head_dim), float("nan"))
    used = slot[slot >= 0]
    sv[used] = torch.randn(len(used), *sv.shape[1:], generator=gen) / rank**0.5
    angle = torch.rand(chunks * chunk_size, head_dim // 2, generator=gen) * 1000
    lists = (x.int() for x in (slot, missed, table))
    return u.to(dtype), sv.to(dtype), *lists, angle.cos(), angle.sin(), chunk_size


def rows_of(chunks: Tensor, table: Tensor, chunk_size: int, page_size: int) -> tuple[Tensor, Tensor]:
    """The pages of the tokens of chunks, and their places in these, each [tokens]."""
    token = (chunks[:, None].long() * chunk_size + torch.arange(chunk_size)).flatten()
    return table[token // page_size].long(), token % page_size


def is_listed(slot: Tensor, chunks: Tensor) -> Tensor:
    """Which of the chunks [S, kv_heads, n] are before the end of their list, of sequences with a slot."""
    return (chunks >= 0).cumprod(dim=-1).bool() & (slot >= 0)[:, None, None]


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """A key sums as many products as the rank; one that is behind a list's end is anything."""
    listed = is_listed(args[2], args[3]).repeat_interleave(args[-1], dim=-1)
    return values_differ(got[0][listed], want[0][listed], terms=args[0].shape[2])
