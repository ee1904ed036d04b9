"""ChunkCacheUpdate on CPU: hits stay, misses take free places, and what it refuses."""

import pytest
import torch

import plugins
from plugins.chunk_cache_update.cases import random_case as chunk_cache_update_case
from tests.support.operators.backends import run_cpu
from tests.support.operators.cases import difference, fresh, reference

NAME = "chunk_cache_update"


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_hits_stay_and_misses_take_the_places_that_are_free():
    cached, counts = ints([[5, 7, -1, 2]], [[1, 2, 3, 4]]), torch.tensor([[[10, 20]], [[5, 5]]])
    chunks, places = plugins.chunk_cache_update(ints([[2, 3, 7, 9]]), cached, counts, ints(0))
    assert cached.tolist() == [[[3, 7, 9, 2]], [[1, 2, 3, 4]]]
    assert chunks.tolist() == [[[3, 9, -1, -1]]] and places.tolist() == [[[0, 2, -1, -1]]]
    assert counts.tolist() == [[[14, 22]], [[5, 5]]]


def test_repeated_calls_keep_what_was_selected_last():
    torch.manual_seed(0)
    num_places, num_chunks = 12, 60
    cached = torch.full((3, 4, num_places), -1, dtype=torch.int32)
    counts = torch.zeros(3, 4, 2, dtype=torch.int64)
    before: list[set[int]] = [set() for _ in range(4)]
    reused = 0
    for _ in range(30):
        lists = [torch.randperm(num_chunks)[:num_places].sort().values for _ in range(4)]
        selected = torch.stack(lists).int()[None]
        chunks, places = plugins.chunk_cache_update(selected, cached, counts, ints(1))
        for head in range(4):
            now = {*selected[0, head].tolist()}
            brought = chunks[0, head][chunks[0, head] >= 0]
            assert {*cached[1, head].tolist()} == now
            assert brought.tolist() == sorted(now - before[head])
            assert torch.equal(cached[1, head][places[0, head][: len(brought)].long()], brought)
            reused += len(now & before[head])
            before[head] = now
    assert counts[1].sum(0).tolist() == [30 * 4 * num_places, reused] and reused > 0
    chunks, places = plugins.chunk_cache_update(selected, cached, counts, ints(1))
    assert (chunks == -1).all() and (places == -1).all()
    assert (cached[[0, 2]] == -1).all() and not counts[[0, 2]].any()


def test_fewer_than_the_places_stay_in_the_first():
    cached, counts = torch.full((1, 1, 6), -1, dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int64)
    for chosen in ([0, 1, 2, 3], [1, 2, 5, 7], [0, 5, 6, 8]):
        plugins.chunk_cache_update(ints([[*chosen, -1, -1]]), cached, counts, ints(0))
        assert sorted(cached[0, 0, :4].tolist()) == chosen and cached[0, 0, 4:].tolist() == [-1, -1]


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
    selected, cached, counts = ints([[0, 1]]), ints([[4, 4]]), torch.ones(1, 1, 2, dtype=torch.int64)
    results = plugins.chunk_cache_update(selected, cached, counts, ints(-1))
    assert all((x == -1).all() and x.shape == (1, 1, 2) for x in results)
    assert cached.tolist() == [[[4, 4]]] and (counts == 1).all()
    results = plugins.chunk_cache_update(ints([[]]), ints([[]]), counts, ints(0))
    assert all(x.shape == (1, 1, 0) for x in results) and (counts == 1).all()


def arguments() -> dict[str, torch.Tensor]:
    return {
        "selected": ints([[0, 4]], [[1, -1]]),
        "cached": ints([[-1, 2]], [[0, 3]], [[9, -8]]),
        "counts": torch.zeros(3, 1, 2, dtype=torch.int64),
        "slot": ints(2, 0),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("selected", ints([[4, 0]], [[1, -1]])),
        ("selected", ints([[0, 0]], [[1, -1]])),
        ("selected", ints([[0, 4]], [[-1, 1]])),
        ("selected", ints([0, 4], [1, -1])),
        ("selected", arguments()["selected"].long()),
        ("cached", ints([[-1, 2, 3]], [[0, 3, 3]])),
        ("cached", arguments()["cached"].long()),
        ("cached", torch.zeros(3, 1, 4, dtype=torch.int32)[..., ::2]),
        ("counts", torch.zeros(3, 1, 2, dtype=torch.int32)),
        ("counts", torch.zeros(2, 1, 2, dtype=torch.int64)),
        ("counts", torch.zeros(3, 1, 4, dtype=torch.int64)[..., ::2]),
        ("slot", ints(3, 0)),
        ("slot", ints(2, 2)),
        ("slot", ints(2)),
    ],
)
def test_refuses_wrong_arguments_by_name_before_any_write(name, value):
    plugins.chunk_cache_update(**arguments())
    wrong = arguments() | {name: value}
    before = [wrong["cached"].clone(), wrong["counts"].clone()]
    with pytest.raises(RuntimeError, match=rf"chunk_cache_update: {name} "):
        plugins.chunk_cache_update(**wrong)
    assert torch.equal(wrong["cached"], before[0]) and torch.equal(wrong["counts"], before[1])


def test_opcheck():
    torch.library.opcheck(torch.ops.kvforge.chunk_cache_update.default, fresh(NAME, tuple(arguments().values())))
