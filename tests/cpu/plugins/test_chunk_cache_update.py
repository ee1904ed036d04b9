"""ChunkCacheUpdate on CPU: hits stay, misses take free places, and what it refuses."""

import pytest
import torch

import plugins
from plugins.random_cases import chunk_cache_update_case
from tests.support.operator_cases import difference, fresh, reference
from tests.support.operator_faces import run_cpu

NAME = "chunk_cache_update"


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_hits_stay_and_misses_take_the_places_that_are_free():
    cached = ints([[5, 7, -1, 2]], [[1, 2, 3, 4]])
    selected = ints([[2, 3, 7, 9]])
    rows, positions, targets = plugins.chunk_cache_update(
        selected, cached, ints(0), ints([10, 11, 12, 13, 14]), ints([8, 6]), 2, 4
    )
    assert cached.tolist() == [[[3, 7, 9, 2]], [[1, 2, 3, 4]]]
    nothing = [-1, -1]
    assert positions.flatten().tolist() == [6, 7, *nothing, 18, 19, *nothing]
    assert rows.flatten().tolist() == [11 * 4 + 2, 11 * 4 + 3, *nothing, 14 * 4 + 2, 14 * 4 + 3, *nothing]
    assert targets.flatten().tolist() == [32, 33, *nothing, 24, 25, *nothing]


def test_repeated_calls_keep_what_was_selected_last():
    torch.manual_seed(0)
    places, chunks = 12, 60
    cached = torch.full((3, 4, places), -1, dtype=torch.int32)
    tables = torch.randperm(60).int().view(1, -1)[:, :30], torch.randperm(60).int().view(1, -1)[:, :6]
    before: list[set[int]] = [set() for _ in range(4)]
    for _ in range(30):
        lists = [torch.randperm(chunks)[:places].sort().values for _ in range(4)]
        selected = torch.stack(lists).int()[None]
        _, positions, _ = plugins.chunk_cache_update(selected, cached, ints(1), *tables, 8, 16)
        for head in range(4):
            now = {*selected[0, head].tolist()}
            brought = positions[:, head][positions[:, head] >= 0] // 8
            assert {*cached[1, head].tolist()} == now
            assert sorted({*brought.tolist()}) == sorted(now - before[head])
            before[head] = now
    _, positions, targets = plugins.chunk_cache_update(selected, cached, ints(1), *tables, 8, 16)
    assert (positions < 0).all() and (targets < 0).all()
    assert (cached[[0, 2]] == -1).all()


def test_fewer_than_the_places_stay_in_the_first():
    cached = torch.full((1, 1, 6), -1, dtype=torch.int32)
    tables = torch.arange(9).int()[None], torch.arange(2).int()[None]  # pages for the first four places
    for chunks in ([0, 1, 2, 3], [1, 2, 5, 7], [0, 5, 6, 8]):
        selected = ints([[*chunks, -1, -1]])
        plugins.chunk_cache_update(selected, cached, ints(0), *tables, 2, 4)
        assert sorted(cached[0, 0, :4].tolist()) == chunks and cached[0, 0, 4:].tolist() == [-1, -1]


def test_the_number_of_threads_changes_nothing():
    threads = torch.get_num_threads()
    try:
        for seed in range(30):
            args = chunk_cache_update_case(seed)
            torch.set_num_threads(3)
            assert difference(NAME, args, run_cpu(NAME, args), reference(NAME, args)) is None, seed
    finally:
        torch.set_num_threads(threads)


def test_nothing_to_do():
    selected, cached = ints([[0, 1]]), ints([[4, 4]])
    results = plugins.chunk_cache_update(selected, cached, ints(-1), ints([-7]), ints([-7]), 2, 2)
    assert all((x == -1).all() and x.shape == (4, 1) for x in results) and cached.tolist() == [[[4, 4]]]
    results = plugins.chunk_cache_update(ints([[]]), ints([[]]), ints(0), ints([0]), ints([0]), 2, 2)
    assert all(x.shape == (0, 1) for x in results)


def arguments() -> dict:
    return {
        "selected": ints([[0, 4]], [[1, -1]]),
        "cached": ints([[-1, 2]], [[0, 3]], [[9, -8]]),
        "slot": ints(2, 0),
        "shadow_table": ints([0, 1, 2], [3, 4, 5]),
        "page_table": ints([0, 7], [1, 8]),
        "chunk_size": 2,
        "page_size": 4,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("selected", ints([[0, 6]], [[1, -1]])),
        ("selected", ints([[0, 2**31 - 1]], [[1, -1]])),
        ("selected", ints([0, 4], [1, -1])),
        ("selected", arguments()["selected"].long()),
        ("cached", ints([[-1, 2, 3]], [[0, 3, 3]])),
        ("cached", arguments()["cached"].long()),
        ("cached", torch.zeros(3, 1, 4, dtype=torch.int32)[..., ::2]),
        ("slot", ints(3, 0)),
        ("slot", ints(2, 2)),
        ("slot", ints(2)),
        ("shadow_table", ints([-1, 1, 2], [3, 4, 5])),
        ("shadow_table", ints([2**30, 1, 2], [3, 4, 5])),
        ("shadow_table", ints([0, 1, 2])),
        ("page_table", ints([-1, 7], [1, 8])),
        ("page_table", torch.empty(2, 0, dtype=torch.int32)),
        ("page_table", ints([0, 7], [1, 8]).float()),
        ("chunk_size", 0),
        ("page_size", 0),
    ],
)
def test_refuses_wrong_arguments_by_name_before_any_write(name, value):
    plugins.chunk_cache_update(**arguments())
    wrong = arguments() | {name: value}
    cached = wrong["cached"].clone()
    with pytest.raises(RuntimeError, match=rf"chunk_cache_update: {name} "):
        plugins.chunk_cache_update(**wrong)
    assert torch.equal(wrong["cached"], cached)


def test_opcheck():
    torch.library.opcheck(torch.ops.kvforge.chunk_cache_update.default, fresh(NAME, tuple(arguments().values())))
