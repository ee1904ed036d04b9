"""Random cases of landmark_select, and the judge of a result."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.agreement import tolerance
from plugins.cases import DTYPES, HEAD_DIMS, SMALL_HEAD_DIMS, poison
from plugins.landmark_select.reference import candidates


def random_case(seed: int, *, small: bool = False, dtypes: Sequence[torch.dtype] = DTYPES) -> tuple:
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
    landmarks, is_outlier = poison(shape, dtype), torch.randint(0, 2, shape[:3], generator=gen).byte()
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


def difference(args: tuple, got: list[Tensor], want: list[Tensor], *, fused: bool = False) -> str | None:
    """A chunk may be swapped for another whose score is that of the least selected one, but for rounding: a logit sums
    head_dim products, and the error is relative to the largest score."""
    for s, head in (got[0] != want[0]).any(-1).nonzero().tolist():
        ours, theirs = (x[0][s, head][x[0][s, head] >= 0].tolist() for x in (got, want))
        swapped = {*ours} ^ {*theirs}
        wrong = f"sequence {s} head {head}: {sorted(swapped & {*ours})} instead of {sorted(swapped & {*theirs})}"
        if len(ours) != len(theirs) or sorted({*ours}) != got[0][s, head, : len(ours)].tolist():
            return wrong
        q, landmarks, is_outlier, starts, table, num_chunks, _, scale, _ = args
        chunks, scores = candidates(q, landmarks, is_outlier, starts, table, num_chunks, scale, s, head)
        score: dict[int, float] = dict(zip(chunks.tolist(), scores.tolist(), strict=True))
        least = min(score[chunk] for chunk in theirs)
        finite = [abs(x) for x in score.values() if math.isfinite(x)]
        near = tolerance(torch.float32, args[0].shape[2]) * max([1.0, *finite])
        if any(not abs(score.get(chunk, math.nan) - least) < near for chunk in swapped):
            return wrong
    return None
