"""SelectedKvWrite on CPU: strides, what it leaves alone, and what it refuses."""

import pytest
import torch

import plugins
from plugins.low_rank_key_reconstruct.cases import is_listed
from plugins.selected_kv_write.cases import random_case as selected_kv_write_case
from tests.support.operators.cases import difference, fresh

NAME = "selected_kv_write"


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


def test_strided_pools_and_host_values():
    for seed in range(30):
        u, sv, host_v, slot, *more, k_pool, v_pool = args = selected_kv_write_case(seed)
        want = fresh(NAME, args)
        plugins.selected_kv_write(*want)
        fused = torch.stack((k_pool, v_pool), dim=1)
        host = torch.cat((host_v, host_v), dim=2)[:, :, : host_v.shape[2]]
        got = plugins.selected_kv_write(doubled(u), doubled(sv), host, slot, *more, fused[:, 0], fused[:, 1])
        for one, other in zip(got, want[-2:], strict=True):
            assert torch.equal(one, other), seed


def test_keys_are_those_of_low_rank_key_reconstruct(isas, monkeypatch):
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        args = fresh(NAME, next(a for a in map(selected_kv_write_case, range(99)) if (a[4] >= 0).sum() > 20))
        u, sv, _, slot, chunks, places, shadow_table, page_table, cos, sin, size, k_pool, _ = args
        plugins.selected_kv_write(*args)
        page_size = k_pool.shape[1]
        keys = plugins.low_rank_key_reconstruct(u, sv, slot, chunks, shadow_table, cos, sin, size)
        for s, head, i in is_listed(slot, chunks).nonzero().tolist():
            place = int(places[s, head, i]) * size + torch.arange(size)
            written = k_pool[page_table[s, place // page_size].long(), place % page_size, head]
            assert torch.equal(written, keys[s, head, i * size : (i + 1) * size]), isa


def test_the_number_of_threads_changes_no_bit():
    threads = torch.get_num_threads()
    try:
        for seed in range(30):
            results = []
            for count in (1, 3):
                torch.set_num_threads(count)
                results.append(plugins.selected_kv_write(*fresh(NAME, selected_kv_write_case(seed))))
            assert all(map(torch.equal, *results)), seed
    finally:
        torch.set_num_threads(threads)


def test_nothing_to_do():
    args = fresh(NAME, next(a for a in map(selected_kv_write_case, range(99)) if (a[4][:, :, 1:] >= 0).any()))
    before = [args[-2].clone(), args[-1].clone()]
    args[4][:, :, 0] = -1
    args[4][:, :, 1:], args[5][:] = 2**31 - 1, 2**31 - 1
    plugins.selected_kv_write(*args)
    assert torch.equal(args[-2], before[0]) and torch.equal(args[-1], before[1])
    args[4][:], args[3][:] = 2**31 - 1, -5
    plugins.selected_kv_write(*args)
    assert torch.equal(args[-2], before[0]) and torch.equal(args[-1], before[1])


def arguments() -> dict[str, object]:
    """Two sequences with two KV heads, chunks of 2 in pages of 4."""
    return {
        "u": torch.randn(3, 4, 5),
        "sv": torch.randn(2, 2, 5, 8),
        "host_v": torch.randn(3, 4, 2, 8),
        "slot": ints(1, 0),
        "chunks": ints([[0, 3], [1, -1]], [[-1, 9], [2, -1]]),
        "places": ints([[0, 1], [1, -1]], [[-1, 9], [0, -1]]),
        "shadow_table": ints([2, 0], [9, 1]),
        "page_table": ints([1], [0]),
        "cos": torch.randn(8, 4),
        "sin": torch.randn(8, 4),
        "chunk_size": 2,
        "k_pool": torch.zeros(2, 4, 2, 8),
        "v_pool": torch.zeros(2, 4, 2, 8),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("u", torch.randn(3, 2, 5)),
        ("u", torch.randn(12, 5)),
        ("u", torch.randn(3, 4, 5).bfloat16()),
        ("sv", torch.randn(2, 2, 4, 8)),
        ("sv", torch.randn(2, 1, 5, 8)),
        ("sv", torch.randn(2, 2, 5, 8).bfloat16()),
        ("host_v", torch.randn(3, 4, 1, 8)),
        ("host_v", torch.randn(2, 4, 2, 8)),
        ("host_v", torch.randn(3, 4, 2, 8).bfloat16()),
        ("host_v", torch.randn(3, 4, 2, 16)[..., ::2]),
        ("slot", ints(2, 0)),
        ("slot", ints(1)),
        ("chunks", ints([[0, 4], [1, -1]], [[-1, 9], [2, -1]])),
        ("chunks", ints([[0, 2**31 - 1], [1, -1]], [[-1, 9], [2, -1]])),
        ("chunks", ints([0, 3], [1, -1])),
        ("places", ints([[0, 2], [1, -1]], [[-1, 9], [0, -1]])),
        ("places", ints([[0, -1], [1, -1]], [[-1, 9], [0, -1]])),
        ("places", torch.zeros(2, 2, 2, dtype=torch.int64)),
        ("shadow_table", ints([2, 3], [9, 1])),
        ("shadow_table", ints([2, -1], [9, 1])),
        ("shadow_table", ints([2, 0])),
        ("page_table", ints([2], [0])),
        ("page_table", ints([-1], [0])),
        ("page_table", torch.zeros(3, 1, dtype=torch.int32)),
        ("cos", torch.randn(8, 8)),
        ("sin", torch.randn(7, 4)),
        ("chunk_size", 0),
        ("chunk_size", 3),
        ("k_pool", torch.zeros(2, 4, 2, 8).to(torch.int8)),
        ("v_pool", torch.zeros(2, 4, 2, 6)),
        ("v_pool", torch.zeros(2, 4, 2, 8).bfloat16()),
    ],
)
def test_refuses_wrong_arguments_by_name_before_any_write(name, value):
    assert plugins.selected_kv_write(**arguments())[0].abs().sum() > 0
    wrong = arguments() | {name: value}
    if name == "k_pool":
        wrong["v_pool"] = value.clone()
    with pytest.raises(RuntimeError, match=rf"selected_kv_write: {name} "):
        plugins.selected_kv_write(**wrong)
    assert not wrong["k_pool"].any() and not wrong["v_pool"].any()


def test_opcheck():
    args = fresh(NAME, tuple(arguments().values()))
    torch.library.opcheck(torch.ops.kvforge.selected_kv_write.default, args)


def test_the_judge_sees_a_slot_that_should_be_left_alone():
    args = selected_kv_write_case(next(s for s in range(99) if selected_kv_write_case(s)[-2].numel() > 99))
    want = fresh(NAME, args)
    plugins.selected_kv_write(*want)
    page, offset, head = (want[-2] == args[-2]).all(-1).nonzero()[0].tolist()
    got = [x.clone() for x in want[-2:]]
    assert difference(NAME, args, got, list(want[-2:])) is None
    got[0][page, offset, head] *= 1.01
    assert difference(NAME, args, got, list(want[-2:])) is not None
