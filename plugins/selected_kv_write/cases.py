"""Random cases of selected_kv_write, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import bits_differ, values_differ
from plugins.cases import DTYPES
from plugins.low_rank_key_reconstruct.cases import random_case as reconstruct_case
from plugins.low_rank_key_reconstruct.cases import rows_of


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `selected_kv_write`: lists of 0 to all chunks, scattered pages, sequences without a slot; what
    belongs to no chunk of a list is NaN or out of range."""
    u, sv, slot, missed, shadow_table, cos, sin, chunk_size = reconstruct_case(seed, small=small, dtypes=dtypes)
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    (sequences, kv_heads, places), page_size, head_dim = missed.shape, u.shape[1], sv.shape[3]
    width = max(1, -(-places * chunk_size // page_size))
    num_pages = sequences * width + rng.randint(1, 3)
    page_table = torch.randperm(num_pages, generator=gen)[: sequences * width].view(sequences, width).int()
    host_v = torch.full((*u.shape[:2], kv_heads, head_dim), float("nan"))
    taken = torch.full_like(missed, -rng.randint(1, 3))
    for s, head in (missed[:, :, :1] >= 0).any(-1).nonzero().tolist():
        count = int((missed[s, head] >= 0).sum())
        taken[s, head, :count] = torch.randperm(places, generator=gen)[:count].sort().values
        page, offset = rows_of(missed[s, head, :count], shadow_table[s], chunk_size, page_size)
        host_v[page, offset, head] = torch.randn(len(page), head_dim, generator=gen)
    pools = [torch.randn(num_pages, page_size, kv_heads, head_dim, generator=gen).to(u.dtype) for _ in range(2)]
    lists = slot, missed, taken, shadow_table, page_table
    return u, sv, host_v.to(u.dtype), *lists, cos, sin, chunk_size, *pools


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """Keys are computed, each from as many products as the rank; values are copied, and all else is left alone."""
    before = args[-2]
    left = (want[0] == before).all(-1)
    wrong = bits_differ(got[0][left], before[left]) or bits_differ(got[1], want[1])
    return wrong or values_differ(got[0], want[0], terms=args[0].shape[2])
