"""Random cases of evict_slots, and the judge of a result."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import bits_differ
from plugins.cases import DTYPES, FORMATS, HEAD_DIMS, PAGE_SIZES, SMALL_HEAD_DIMS, CacheFormat, paged_pools
from plugins.kv_quantization import LARGEST, dynamic_scale, quantize


def random_case(
    seed: int,
    *,
    small: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
    formats: Sequence[CacheFormat] = FORMATS,
) -> tuple:
    """Arguments of `evict_slots`: nothing, one slot or all kept, few different scores, some of them not finite, slots
    sealed or not; pages are scattered, and what belongs to no slot is NaN or out of range."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    cache, dtype = formats[seed % len(formats)], rng.choice(dtypes)
    kv_heads, head_dim = rng.randint(1, 3 if small else 8), rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS)
    sequences, page_size = rng.randint(0, 3 if small else 5), rng.choice(PAGE_SIZES)
    longest = rng.choice((1, page_size, rng.randint(1, 40 if small else 300)))
    width = -(-longest // page_size) + rng.randint(0, 1)
    lengths = [rng.choice((0, 1, longest, rng.randint(0, longest))) for _ in range(sequences)]
    keep = [rng.choice((0, n, max(n - 1, 0), n // 2, rng.randint(0, n))) for n in lengths]
    sealed = [rng.choice((0, n, max(n - 1, 0), rng.randint(0, n))) for n in lengths]
    num_pages = [sequences * width + rng.randint(1, 3) for _ in range(2)]
    tables = [torch.randperm(n, generator=gen)[: sequences * width].view(sequences, width) for n in num_pages]
    shape, state_shape = (num_pages[0], page_size, kv_heads, head_dim), (num_pages[1], page_size, kv_heads)
    pools = paged_pools(shape, cache, dtype)
    statistics = [torch.full(state_shape, float("nan")) for _ in range(2)]
    position = torch.randint(-(2**31), 2**31 - 1, state_shape, generator=gen).int()
    score = torch.full((sequences, kv_heads, longest + rng.randint(0, 2)), float("nan"))
    shift = torch.randint(0, 1000, (sequences,), generator=gen)
    for s, length in enumerate(lengths):
        slot = torch.arange(length)
        (page, state), offset = (table[s, slot // page_size] for table in tables), slot % page_size
        score[s, :, :length] = _scores(rng, gen, (kv_heads, length))
        for tensor in statistics:
            tensor[state, offset] = torch.rand(length, kv_heads, generator=gen)
        for pool, scales in zip(pools[:2], pools[2:], strict=True):
            rows = torch.randn(length, kv_heads, head_dim, generator=gen)
            if pool.dtype not in LARGEST:
                pool[page, offset] = rows.to(pool.dtype)
                continue
            scale = dynamic_scale(rows, pool.dtype)
            pool.view(torch.int8)[page, offset] = quantize(rows, scale[..., None], pool.dtype).view(torch.int8)
            if scales is not None:
                scales[page, offset] = scale
        for head in range(kv_heads):  # a lane's own positions, all before those of the slots that are not sealed
            held = torch.randperm(sealed[s] + int(shift[s]), generator=gen)[: sealed[s]]
            position[state[: sealed[s]], offset[: sealed[s]], head] = held.int()
        for table in tables:
            table[s, -(-length // page_size) :] = rng.choice((-5, 10**6))
        if rng.random() < 0.15:
            tables[1][s] = -rng.randint(1, 3)
    lists = (torch.tensor(x, dtype=torch.int32) for x in (keep, lengths, sealed))
    given = [tensor if rng.random() < 0.7 else None for tensor in statistics]
    return score, *lists, shift.int(), *(table.int() for table in tables), position, *pools, *given


def _scores(rng: random.Random, gen: torch.Generator, shape: tuple[int, int]) -> Tensor:
    """Some all different, some of few values with both zeros, and some not finite."""
    values = torch.randn(shape, generator=gen)
    if rng.random() < 0.5:
        values = (values * rng.choice((0.5, 2))).round()  # rounds to both zeros
    if rng.random() < 0.5:
        for special in (float("nan"), float("inf"), -float("inf"), 1e-40):
            values[torch.rand(shape, generator=gen) < rng.choice((0.0, 0.1))] = special
    return values


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """What stays is moved bit for bit, and all else is left alone."""
    return next((wrong for pair in zip(got, want, strict=True) if (wrong := bits_differ(*pair))), None)
