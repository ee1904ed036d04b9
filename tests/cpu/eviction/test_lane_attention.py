"""Attention over heads that keep different numbers of tokens, against dense attention head by head in float64."""

import random

import pytest
import torch
from torch import Tensor

import plugins
from model_defs.cache_insertion import Pages
from model_defs.columns import columns_of
from model_defs.lane_attention import LaneAttention, LaneObservation
from plugins.kv_quantization import dequantize, dynamic_scale, quantize

BUDGET, PAGE, DIM = 8, 4, 16


def dense(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Of the last queries ``[n, group, d]`` of a head over its tokens ``[N, d]``, causal."""
    n, length = len(q), len(keys)
    scores = torch.einsum("ngd,kd->ngk", q.double(), keys.double()) * DIM**-0.5
    unseen = torch.arange(length)[None, :] > torch.arange(length - n, length)[:, None]
    return scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1) @ values.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_head_sees_its_own_columns_and_the_later_pages(dtype: torch.dtype) -> None:
    plugins.load_library()
    for seed in range(60):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        heads, group, sequences = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.randint(1, 4)
        kept = BUDGET // PAGE
        width = heads * kept - (heads - 1)
        pages = rng.sample(range(60), 60)
        values = [torch.randn(60, PAGE, heads, DIM) for _ in range(2)]
        cache: list[Tensor] = [x.to(dtype) for x in values] if dtype != torch.int8 else []
        if dtype == torch.int8:
            scales = [dynamic_scale(x, dtype) for x in values]
            cache = [quantize(x, s[..., None], dtype) for x, s in zip(values, scales, strict=True)] + scales
        stored = [dequantize(x, s, 1.0) for x, s in zip(cache[:2], cache[2:] or (None, None), strict=True)]
        lane_pages = torch.full((sequences + 2, heads), 99, dtype=torch.int32)
        lane_table = torch.full((sequences + 2, heads, width), 99, dtype=torch.int32)
        slots = rng.sample(range(sequences + 2), sequences)
        slot, lengths, queries, table, expected = [], [], [], [], []
        q_type = torch.float32 if dtype != torch.bfloat16 else dtype
        most = 6
        for s in range(sequences):
            is_cut = rng.random() < 0.6
            count = 1 if is_cut or rng.random() < 0.5 else rng.randint(1, 5)
            length = BUDGET + rng.randint(1, 14) if is_cut else rng.randint(count, most * PAGE)
            own = [pages.pop() for _ in range(most)]
            each = torch.randn(count, heads * group, DIM).to(q_type)
            division = [1] * heads
            for _ in range(heads * kept - heads):
                division[rng.randrange(heads)] += 1
            columns = [(page, h) for page in range(kept) for h in range(heads)]
            rng.shuffle(columns)
            outs = []
            for h in range(heads):
                mine = [(own[i // PAGE], i % PAGE, h) for i in range(length)]
                if is_cut:
                    taken, columns = columns[: division[h]], columns[division[h] :]
                    lane_pages[slots[s], h] = len(taken)
                    numbers = [own[page] * PAGE * heads + column for page, column in taken]
                    lane_table[slots[s], h, : len(taken)] = torch.tensor(numbers)
                    mine = [(own[page], row, column) for page, column in taken for row in range(PAGE)] + mine[BUDGET:]
                k, v = (torch.stack([x[place] for place in mine]) for x in stored)
                outs.append(dense(each[:, h * group : (h + 1) * group], k, v))
            expected.append(torch.cat(outs, 1))
            slot.append(slots[s] if is_cut else -1)
            lengths.append(length)
            queries.append(each)
            table.append(own)
        attend = LaneAttention(LaneObservation(0, num_pools=4, budget=BUDGET), torch.tensor(slot, dtype=torch.int32))
        starts = torch.tensor([0, *torch.tensor([len(x) for x in queries]).cumsum(0)], dtype=torch.int32)
        nothing = torch.empty(0)
        got = attend(
            torch.cat(queries),
            (*cache, nothing, nothing, lane_pages, lane_table),
            Pages(starts, torch.tensor(lengths, dtype=torch.int32), torch.tensor(table, dtype=torch.int32)),
            DIM**-0.5,
            (1.0, 1.0),
            0,
        )
        want = torch.cat(expected)
        # Sums of at most 24 weighted values, of weights and values that are rounded once each.
        bound = (
            4 * torch.finfo(q_type).eps * max(x.abs().max() for x in stored) * (24 if q_type == torch.float32 else 1)
        )
        assert got.shape == want.shape and (got.double() - want).abs().max() <= bound, seed


def test_columns_are_the_parts_of_pages() -> None:
    pool = torch.arange(5 * 4 * 3 * 2).view(5, 4, 3, 2)
    for size in (1, 2, 4):
        columns = columns_of(pool, size)
        for page in range(5):
            for begin in range(0, 4, size):
                for head in range(3):
                    column = columns[(page * 4 + begin) * 3 + head, :, 0]
                    assert (column == pool[page, begin : begin + size, head]).all()
    scales = torch.arange(5 * 4 * 3).view(5, 4, 3)
    assert (columns_of(scales, 4)[2 * 12 + 1, :, 0] == scales[2, :, 1]).all()
