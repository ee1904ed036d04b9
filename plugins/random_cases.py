"""Random arguments for each operator, awkward shapes included: every face is tested on the same cases.

What an operator must not read or use is poison: NaN in unused slots of the pools, arbitrary numbers in
unused entries of page tables.
"""

import random

import torch
from torch import Tensor

HEAD_DIMS = (64, 80, 96, 128, 256, 32, 48, 20)
PAGE_SIZES = (1, 16, 32, 100)
DTYPES = (torch.float32, torch.bfloat16)


def rope_paged_kv_write_case(seed: int) -> tuple[Tensor, ...]:
    """Arguments of `rope_paged_kv_write`; slots are distinct, some negative, k and v may be strided views."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, head_dim, page_size = rng.randint(1, 8), rng.choice(HEAD_DIMS), rng.choice(PAGE_SIZES)
    tokens = rng.choice((0, 1, rng.randint(2, 40), rng.randint(2, 300)))
    source, target = rng.choice(DTYPES), rng.choice(DTYPES)
    if rng.random() < 0.5:
        fused = torch.randn(tokens, 3 * kv_heads, head_dim, generator=gen).to(source)
        k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    else:
        k, v = (torch.randn(tokens, kv_heads, head_dim, generator=gen).to(source) for _ in range(2))
    angle = torch.rand(tokens, head_dim // 2, generator=gen) * 1000
    pages = tokens // page_size + rng.randint(1, 4)
    slots = torch.randperm(pages * page_size, generator=gen)[:tokens]
    slots[torch.rand(tokens, generator=gen) < rng.choice((0.0, 0.3))] = -rng.randint(1, 9)
    k_pool, v_pool = (torch.full((pages, page_size, kv_heads, head_dim), float("nan"), dtype=target) for _ in range(2))
    return k, v, angle.cos(), angle.sin(), slots.int(), k_pool, v_pool


def paged_attention_case(
    seed: int, *, q_dtype: torch.dtype | None = None, pool_dtype: torch.dtype | None = None
) -> tuple:
    """Arguments of `paged_attention`, of one to five sequences with permuted pages."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group = rng.randint(1, 4), rng.randint(1, 8)
    head_dim, page_size = rng.choice(HEAD_DIMS), rng.choice(PAGE_SIZES)
    q_dtype = q_dtype or rng.choice(DTYPES)
    pool_dtype = pool_dtype or rng.choice((q_dtype, *DTYPES))
    window = rng.choice((0, 0, 0, 1, rng.randint(2, 40), rng.randint(41, 400)))
    sequences = rng.randint(1, 5)
    queries = [rng.choice((0, 1, 1, rng.randint(2, 16), rng.randint(17, 150))) for _ in range(sequences)]
    lengths = [n + rng.choice((0, rng.randint(0, 50), rng.randint(0, 700))) for n in queries]

    num_tables = max(1, *(-(-length // page_size) for length in lengths)) + rng.randint(0, 3)
    pages = sum(-(-length // page_size) for length in lengths) + rng.randint(1, 5)
    free = torch.randperm(pages, generator=gen).tolist()
    page_table = torch.randint(-(2**31), 2**31 - 1, (sequences, num_tables), generator=gen)
    shape = (pages, page_size, kv_heads, head_dim)
    k_pool, v_pool = (torch.full(shape, float("nan"), dtype=pool_dtype) for _ in range(2))
    for s, (n, length) in enumerate(zip(queries, lengths, strict=True)):
        first_key = max(0, length - n - window + 1) if window else 0
        if n == 0:
            continue
        for logical in range(first_key // page_size, -(-length // page_size)):
            page_table[s, logical] = page = free.pop()
            low = max(first_key - logical * page_size, 0)
            high = min(length - logical * page_size, page_size)
            for pool in (k_pool, v_pool):
                value = torch.randn(high - low, kv_heads, head_dim, generator=gen)
                pool[page, low:high] = value.to(pool_dtype)
    heads = kv_heads * group
    q = torch.randn(sum(queries), heads + 2 * kv_heads, head_dim, generator=gen).to(q_dtype)
    q = q[:, :heads] if rng.random() < 0.5 else q[:, :heads].contiguous()
    query_start = torch.tensor([0, *queries]).cumsum(0).int()
    kv_length = torch.tensor(lengths).int()
    scale = rng.choice((1.0, 2.0)) * head_dim**-0.5
    return q, k_pool, v_pool, query_start, kv_length, page_table.int(), scale, window
