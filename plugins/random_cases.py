"""Random arguments for each operator, awkward shapes included: every face is tested on the same cases.

What an operator must not read or use is poison: NaN in unused slots of the pools and scales, arbitrary numbers
in unused entries of tables. `small=True` keeps shapes small, for faces that run slowly; `dtypes` are the float
dtypes to choose from, `formats` the formats of the cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.kv_quantization import LARGEST, dynamic_scale, quantize
from plugins.packed_linear.packing import pack

HEAD_DIMS = (64, 80, 96, 128, 256, 32, 48, 20)
SMALL_HEAD_DIMS = (16, 20, 32, 64)
PAGE_SIZES = (1, 16, 32, 100)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class CacheFormat:
    """What a pool holds: `dtype` None is the float dtype of the case; `dynamic` means a scale per token and head."""

    dtype: torch.dtype | None = None
    dynamic: bool = False


FLOAT = CacheFormat()
FORMATS = (
    FLOAT,
    CacheFormat(torch.float8_e4m3fn, dynamic=True),
    CacheFormat(torch.float8_e4m3fn),
    CacheFormat(torch.int8, dynamic=True),
    CacheFormat(torch.int8),
)


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN where the dtype has one, else the largest value."""
    return torch.full(shape, 127 if dtype == torch.int8 else float("nan"), dtype=torch.float32).to(dtype)


def _pools(
    shape: tuple[int, ...], dtype: torch.dtype, dynamic: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    pools = [_poison(shape, dtype) for _ in range(2)]
    scales = [_poison(shape[:3], torch.float32) if dynamic else None for _ in range(2)]
    return pools[0], pools[1], scales[0], scales[1]


def _static_scales(rng: random.Random, cache: CacheFormat) -> tuple[float, float]:
    """Powers of two times odd factors, some small enough to saturate."""
    if cache.dtype is None or cache.dynamic:
        return 1.0, 1.0
    largest = LARGEST[cache.dtype]
    return rng.uniform(1.5, 6.0) / largest, rng.uniform(1.5, 6.0) / largest


def rope_paged_kv_write_case(
    seed: int,
    *,
    small: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
    formats: Sequence[CacheFormat] = FORMATS,
) -> tuple:
    """Arguments of `rope_paged_kv_write`; slots are distinct, some negative, k and v may be strided views."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads = rng.randint(1, 3 if small else 8)
    head_dim, page_size = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS), rng.choice(PAGE_SIZES)
    tokens = rng.choice((0, 1, rng.randint(2, 20 if small else 40), rng.randint(2, 20 if small else 300)))
    cache = formats[seed % len(formats)]
    source, target = rng.choice(dtypes), rng.choice(dtypes)
    if rng.random() < 0.5:
        fused = torch.randn(tokens, 3 * kv_heads, head_dim, generator=gen).to(source)
        k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    else:
        k, v = (torch.randn(tokens, kv_heads, head_dim, generator=gen).to(source) for _ in range(2))
    if tokens and rng.random() < 0.3:  # a row of zeros has a scale too
        k[rng.randrange(tokens)] = 0
    angle = torch.rand(tokens, head_dim // 2, generator=gen) * 1000
    pages = tokens // page_size + rng.randint(1, 4)
    slots = torch.randperm(pages * page_size, generator=gen)[:tokens]
    slots[torch.rand(tokens, generator=gen) < rng.choice((0.0, 0.3))] = -rng.randint(1, 9)
    shape = (pages, page_size, kv_heads, head_dim)
    pools = _pools(shape, cache.dtype or target, cache.dynamic)
    return k, v, angle.cos(), angle.sin(), slots.int(), *pools, *_static_scales(rng, cache)


def paged_attention_case(
    seed: int,
    *,
    q_dtype: torch.dtype | None = None,
    pool_dtype: torch.dtype | None = None,
    small: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
    formats: Sequence[CacheFormat] = FORMATS,
) -> tuple:
    """Arguments of `paged_attention`, of one to five sequences with permuted pages.

    A float `pool_dtype` asks for a cache of that dtype, whatever `formats` says.
    """
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = formats[seed % len(formats)] if pool_dtype is None else FLOAT
    kv_heads, group = rng.randint(1, 2 if small else 4), rng.randint(1, 8)
    head_dim, page_size = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS), rng.choice(PAGE_SIZES)
    q_dtype = q_dtype or rng.choice(dtypes)
    dtype = cache.dtype or pool_dtype or rng.choice((q_dtype, *dtypes))
    window = rng.choice((0, 0, 0, 1, rng.randint(2, 40), rng.randint(41, 400)))
    sequences = rng.randint(1, 3 if small else 5)
    most, past = (24, 60) if small else (150, 700)
    queries = [rng.choice((0, 1, 1, rng.randint(2, 16), rng.randint(17, most))) for _ in range(sequences)]
    lengths = [n + rng.choice((0, rng.randint(0, 50), rng.randint(0, past))) for n in queries]

    num_tables = max(1, *(-(-length // page_size) for length in lengths)) + rng.randint(0, 3)
    pages = sum(-(-length // page_size) for length in lengths) + rng.randint(1, 5)
    free = torch.randperm(pages, generator=gen).tolist()
    page_table = torch.randint(-(2**31), 2**31 - 1, (sequences, num_tables), generator=gen)
    k_pool, v_pool, k_scales, v_scales = _pools((pages, page_size, kv_heads, head_dim), dtype, cache.dynamic)
    k_scale, v_scale = _static_scales(rng, cache)
    for s, (n, length) in enumerate(zip(queries, lengths, strict=True)):
        first_key = max(0, length - n - window + 1) if window else 0
        if n == 0:
            continue
        for logical in range(first_key // page_size, -(-length // page_size)):
            page_table[s, logical] = page = free.pop()
            low = max(first_key - logical * page_size, 0)
            high = min(length - logical * page_size, page_size)
            for pool, scales, scale in ((k_pool, k_scales, k_scale), (v_pool, v_scales, v_scale)):
                value = torch.randn(high - low, kv_heads, head_dim, generator=gen)
                if dtype not in LARGEST:
                    pool[page, low:high] = value.to(dtype)
                elif scales is None:
                    pool[page, low:high] = quantize(value, scale, dtype)
                else:
                    value *= torch.rand(high - low, kv_heads, 1, generator=gen) + 0.5
                    scales[page, low:high] = dynamic_scale(value, dtype)
                    pool[page, low:high] = quantize(value, scales[page, low:high, :, None], dtype)
    heads = kv_heads * group
    q = torch.randn(sum(queries), heads + 2 * kv_heads, head_dim, generator=gen).to(q_dtype)
    q = q[:, :heads] if rng.random() < 0.5 else q[:, :heads].contiguous()
    query_start = torch.tensor([0, *queries]).cumsum(0).int()
    scales = (k_scales, v_scales, k_scale, v_scale)
    return (
        q,
        k_pool,
        v_pool,
        query_start,
        torch.tensor(lengths).int(),
        page_table.int(),
        head_dim**-0.5,
        window,
        *scales,
    )


def low_rank_key_reconstruct_case(
    seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES
) -> tuple[Tensor, ...]:
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


def speculative_verify_case(seed: int, *, small: bool = False) -> tuple[Tensor, ...]:
    """Arguments of `speculative_verify`: mixed greedy and sampled, drafts that are mostly good, all or none."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab = rng.choice((1, 2, 7, 40, 100) if small else (1, 2, 7, 130, 1664, 5000))
    gammas = [rng.choice((0, 1, rng.randint(2, 8))) for _ in range(rng.randint(0, 3 if small else 6))]
    sequences, drafts = len(gammas), sum(gammas)
    spread = rng.choice((0.5, 3.0, 20.0))
    logits = torch.randn(drafts + sequences, vocab, generator=gen) * spread
    if rng.random() < 0.3:  # equal maxima, and tokens that cannot be drawn
        logits = logits.round()
        logits[:, 1::3] = float("-inf")
    temperature = torch.tensor([rng.choice((0.0, 1.0, rng.uniform(0.3, 2.0))) for _ in gammas])
    draft_ids = torch.zeros(drafts, dtype=torch.long)
    proposal = torch.softmax(torch.randn(drafts, vocab, generator=gen) * spread, dim=-1)
    row = draft = 0
    for gamma in gammas:
        for j in range(gamma):
            good = rng.random() < 0.7
            draft_ids[draft] = logits[row + j].argmax() if good else torch.randint(0, vocab, (), generator=gen)
            if good:
                proposal[draft] = torch.softmax(logits[row + j] / rng.uniform(0.5, 2.0), dim=-1)
            draft += 1
        row += gamma + 1
    starts = torch.tensor([0, *gammas]).cumsum(0)
    uniform = torch.rand(drafts + sequences, 2, generator=gen)
    draft_probs = proposal if rng.random() < 0.6 else proposal[:0]
    return logits, draft_ids.int(), starts.int(), draft_probs.contiguous(), temperature, uniform


def packed_linear_case(seed: int, *, small: bool = False) -> tuple:
    """Arguments of `packed_linear`: odd depths, outputs that fill no panel, rows that may be strided."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).bfloat16()

    most = 60 if small else 400
    rows = rng.choice((0, 1, 2, rng.randint(3, 20), rng.randint(3, most)))
    depth = rng.choice((1, 2, rng.randint(3, 130), rng.randint(3, 200 if small else 1400)))
    outputs = rng.choice((1, 64, 65, rng.randint(2, 200)))
    gated, float32_out = rng.random() < 0.4, rng.random() < 0.5
    packed_rows = 2 * outputs if gated else outputs
    weight = torch.randn(packed_rows, depth, generator=gen) * depth**-0.5
    weight, scales = pack(weight.bfloat16(), (torch.bfloat16, torch.int8)[seed % 2], gated)
    x = normal(rows, depth + 3)[:, 3:] if rng.random() < 0.5 else normal(rows, depth)
    if rows and rng.random() < 0.3:  # a row of zeros has a scale too
        x[rng.randrange(rows)] = 0
    bias = normal(packed_rows) if rng.random() < 0.5 else None
    norm = normal(depth) if rng.random() < 0.5 else None
    residual = normal(rows, outputs + 5)[:, :outputs] if rng.random() < 0.5 else None
    return x, weight, scales, bias, norm, residual, outputs, 1e-5, gated, float32_out


def landmark_select_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
    """Arguments of `landmark_select`: permuted pages, sequences without chunks or a query, small integers
    (equal scores) in some cases, sequences that are all outliers but a few."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, kv_heads, group = rng.choice(dtypes), rng.randint(1, 2 if small else 4), rng.randint(1, 8)
    head_dim = rng.choice(SMALL_HEAD_DIMS if small else HEAD_DIMS)
    chunks_per_page, sequences = rng.choice((1, 2, 4, 13)), rng.randint(0, 3 if small else 5)
    most = 40 if small else 700
    counts = [rng.choice((0, 1, rng.randint(1, 20), rng.randint(1, most))) for _ in range(sequences)]
    queries = [rng.choice((0, 1, 1, 1, 3)) for _ in range(sequences)]
    max_selected = rng.choice((0, 1, rng.randint(1, 30), rng.randint(1, 300)))
    selected = [rng.choice((0, max_selected, rng.randint(0, max_selected))) for _ in range(sequences)]
    pages = [-(-count // chunks_per_page) for count in counts]
    num_pages = sum(pages) + rng.randint(1, 5)
    free = torch.randperm(num_pages, generator=gen).int()
    table = torch.randint(-(2**31), 2**31 - 1, (sequences, max(1, *pages, 0) + rng.randint(0, 2)), generator=gen).int()
    shape = (num_pages, chunks_per_page, kv_heads, head_dim)
    landmarks, is_outlier = _poison(shape, dtype), torch.randint(0, 2, shape[:3], generator=gen).byte()
    whole = rng.random() < 0.3
    begin = 0
    for s, (count, used) in enumerate(zip(counts, pages, strict=True)):
        table[s, :used] = free[begin : begin + used]
        value = torch.randn(count, kv_heads, head_dim, generator=gen)
        few = rng.choice((0.0, 0.1, 0.95))
        outlier = torch.rand(count, kv_heads, generator=gen) < few
        for m in range(count):
            page, place = int(table[s, m // chunks_per_page]), m % chunks_per_page
            landmarks[page, place] = (value[m].round() if whole else value[m]).to(dtype)
            is_outlier[page, place] = outlier[m].byte() * rng.choice((1, 255))
        begin += used
    starts = torch.tensor([0, *queries]).cumsum(0)
    q = torch.randn(sum(queries), kv_heads * group, head_dim, generator=gen)
    q = (q.round() if whole else q * rng.choice((1.0, 4.0))).to(dtype)
    for s, count in enumerate(queries):
        q[int(starts[s]) : int(starts[s]) + count - 1] = float("nan")
    scale = 0.125 if whole else head_dim**-0.5
    ints = [torch.tensor(x, dtype=torch.int32) for x in (counts, selected)]
    return q, landmarks, is_outlier, starts.int(), table, *ints, scale, max_selected


def chunk_cache_update_case(seed: int, *, small: bool = False) -> tuple[Tensor, ...]:
    """Arguments of `chunk_cache_update`: places that are empty, hit or taken by others, sequences without a slot."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    sequences, kv_heads = rng.randint(0, 3 if small else 6), rng.randint(1, 3 if small else 8)
    places = rng.choice((0, 1, rng.randint(1, 12 if small else 60)))
    chunks = places + rng.choice((0, 1, rng.randint(0, 2 * places + 20)))
    slots = sequences + rng.randint(0, 2)
    selected = torch.full((sequences, kv_heads, places), -1)
    cached = torch.full((slots, kv_heads, places), -1)
    for s in range(sequences):
        count = rng.choice((places, rng.randint(0, places)))
        for head in range(kv_heads):
            selected[s, head, :count] = torch.randperm(chunks, generator=gen)[:count].sort().values
    for s in range(slots):
        kept = rng.choice((0.0, 0.5, 1.0))
        for head in range(kv_heads):
            cached[s, head] = torch.randperm(chunks, generator=gen)[:places]
        cached[s][torch.rand(kv_heads, places, generator=gen) > kept] = -rng.randint(1, 3)
    slot = torch.randperm(slots, generator=gen)[:sequences]
    slot[torch.rand(sequences, generator=gen) < 0.2] = -rng.randint(1, 3)
    counts = torch.randint(0, 2**40, (slots, kv_heads, 2), generator=gen)
    return selected.int(), cached.int(), counts, slot.int()


def selected_kv_write_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
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
