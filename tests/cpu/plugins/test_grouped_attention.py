"""GroupedAttention on CPU against its definition, its invariances, and what it refuses."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from plugins.grouped_attention.cases import difference
from plugins.grouped_attention.cases import random_case as grouped_case
from plugins.grouped_attention.reference import reference
from plugins.seal_pages.cases import sealed_pools
from plugins.seal_pages.layout import BITS
from tests.support.operators.cases import fresh

DTYPES = (torch.float32, torch.bfloat16)
each_format = pytest.mark.parametrize("bits", BITS)


def attend(*args) -> Tensor:
    return torch.ops.kvforge.grouped_attention(*args)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@functools.cache
def long_case(dtype: torch.dtype, page_size: int, window: int, bits: int) -> tuple:
    """A decode step, a chunk after a long past and a whole prompt, each of several blocks of keys; every page is there
    both sealed and exact."""
    torch.manual_seed(0)
    kv_heads, head_dim, lengths, counts = 2, 64, (2500, 1431, 170), (1, 60, 170)
    columns = -(-max(lengths) // page_size)
    pages = 3 * columns
    exact = [torch.randn(pages, page_size, kv_heads, head_dim).to(dtype) for _ in "kv"]
    pools = sealed_pools(pages, page_size, kv_heads, head_dim, bits)
    table, exact_table = (torch.randperm(pages).view(3, columns).int() for _ in range(2))
    pairs = torch.stack((exact_table, table), -1).flatten(0, 1)
    torch.ops.kvforge.seal_pages(*exact, pairs, *pools)
    q = torch.randn(sum(counts), 3 * kv_heads, head_dim).to(dtype)
    starts = ints(0, *torch.tensor(counts).cumsum(0).tolist())
    return q, *pools, *exact, starts, ints(*lengths), table, exact_table, head_dim**-0.5, window


def some_queries(args: tuple, s: int, first: int, last: int) -> tuple:
    """The queries [first, last) of sequence `s` alone."""
    q, starts, lengths, table, exact_table = args[0], *args[7:11]
    begin, end = starts[s : s + 2].tolist()
    length = int(lengths[s]) - (end - begin) + last
    rest = ints(0, last - first), ints(length), table[s : s + 1], exact_table[s : s + 1]
    return q[begin + first : begin + last], *args[1:7], *rest, *args[11:]


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "window"), [(32, 0), (64, 700), (288, 0), (288, 100)])
def test_long_keys_are_divided_and_added(dtype: torch.dtype, page_size: int, window: int, bits: int, isa: str) -> None:
    """Blocks end within pages, pages within blocks, and an own page may be longer than a block."""
    args = long_case(dtype, page_size, window, bits)
    assert difference(args, [attend(*args)], [reference(*args)]) is None


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "window"), [(32, 0), (64, 700), (288, 100)])
def test_chunks_neighbours_pages_and_threads_change_no_bit(
    dtype: torch.dtype, page_size: int, window: int, bits: int, isa: str
) -> None:
    args = long_case(dtype, page_size, window, bits)
    together, starts, threads = attend(*args), args[7].tolist(), torch.get_num_threads()
    generator = torch.Generator().manual_seed(1)
    to = [torch.randperm(len(x), generator=generator) for x in (args[1], args[5])]
    moved = [x[torch.argsort(to[index])] for index, pools in enumerate((args[1:5], args[5:7])) for x in pools]
    others = (args[0], *moved, *args[7:9], *(to[i][args[9 + i].long()].int() for i in range(2)), *args[11:])
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(attend(*others), together)
    finally:
        torch.set_num_threads(threads)
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        for first in range(0, end - begin, 23):
            last = min(first + 23, end - begin)
            alone = attend(*some_queries(args, s, first, last))
            assert torch.equal(alone, together[begin + first : begin + last]), (s, first)


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e9, 1e18])
def test_huge_scores_pick_their_keys(dtype: torch.dtype, size: float, bits: int, isa: str) -> None:
    """Scores far beyond what their differences resolve: all weight is on the largest, and nothing becomes NaN."""
    q, *rest = some_queries(long_case(dtype, 32, 0, bits), 1, 0, 60)
    result = attend((q.float() * size).to(dtype), *rest)
    assert result.isfinite().all()
    assert result.abs().max() <= max(float(x.float().abs().max()) for x in rest[4:6])


def test_wrong_arguments_are_refused() -> None:
    args = long_case(torch.float32, 32, 0, 2)
    wrong = {
        "q must have the dtype of exact_k": {0: args[0].bfloat16()},
        "q must have the head_dim of the pools": {0: args[0][..., :32]},
        "v_codes must have shape": {2: args[2][:, :, :1]},
        "k_groups must be": {3: args[3].float()},
        "k_codes must have tiles of 64 bytes": {1: args[1][..., :48]},
        "exact_v must have shape": {6: args[6][:1]},
        "page_table of sequence 0 names page 9999": {9: args[9] * 0 + 9999},
        "exact_table of sequence 0 names page -1": {10: args[10] * 0 - 1},
        "more than the 79 pages of page_table hold": {8: args[8] + 100},
        "less than its 60 queries": {8: args[8] * 0 + 59},
        "window must be": {12: -1},
        "scale must be finite": {11: float("nan")},
    }
    for message, changed in wrong.items():
        with pytest.raises(RuntimeError, match=f"grouped_attention: .*{message}"):
            attend(*(changed.get(i, value) for i, value in enumerate(args)))


def test_nothing_to_do() -> None:
    args = grouped_case(0)
    none = args[0][:0], *args[1:7], ints(0), ints(), *(x[:0] for x in args[9:11]), *args[11:]
    assert attend(*none).shape == args[0][:0].shape


def test_strided_queries(isa: str) -> None:
    args = fresh("grouped_attention", long_case(torch.float32, 64, 700, 4))
    q = torch.cat((args[0], args[0]), -1)[..., : args[0].shape[2]]
    assert torch.equal(attend(q, *args[1:]), attend(*args))
