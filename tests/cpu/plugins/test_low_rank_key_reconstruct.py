"""LowRankKeyReconstruct on CPU against its reference, its invariances, and what it refuses."""

import pytest
import torch

import plugins
from plugins.low_rank_key_reconstruct.cases import random_case as low_rank_key_reconstruct_case
from tests.support.rounding import assert_near, sum_error, unit_roundoff

REFERENCE = plugins.OPERATORS["low_rank_key_reconstruct"].reference


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_key_does_not_depend_on_the_others(isas, monkeypatch):
    for seed in range(40):
        u, sv, start, rows, positions, cos, sin = low_rank_key_reconstruct_case(seed)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            together = plugins.low_rank_key_reconstruct(u, sv, start, rows, positions, cos, sin)
            for s in range(sv.shape[0]):
                for n in range(int(start[s]), int(start[s + 1]), 13):
                    one = rows[n : n + 1], positions[n : n + 1]
                    alone = plugins.low_rank_key_reconstruct(u, sv[s : s + 1], ints(0, 1), *one, cos, sin)
                    selected = rows[n] >= 0
                    assert torch.equal(alone[0][selected], together[n][selected]), (seed, isa, n)


def test_the_number_of_threads_changes_no_bit():
    threads = torch.get_num_threads()
    try:
        for seed in range(30):
            args = low_rank_key_reconstruct_case(seed)
            results = []
            for count in (1, 3):
                torch.set_num_threads(count)
                results.append(plugins.low_rank_key_reconstruct(*args)[args[3] >= 0])
            assert torch.equal(*results), seed
    finally:
        torch.set_num_threads(threads)


def test_strided_arguments_are_taken():
    cases = (low_rank_key_reconstruct_case(seed) for seed in range(100))
    u, sv, start, rows, positions, cos, sin = next(c for c in cases if len(c[3]) > 1 and min(c[1].shape) > 1)
    want = plugins.low_rank_key_reconstruct(u, sv, start, rows, positions, cos, sin)
    assert want.numel()
    views = [torch.stack((x, x), dim=-1)[..., 0] for x in (u, sv, rows, positions, cos, sin)]
    assert not any(x.is_contiguous() for x in views)
    got = plugins.low_rank_key_reconstruct(*views[:2], start, *views[2:])
    assert torch.equal(got[rows >= 0], want[rows >= 0])


def arguments() -> dict[str, torch.Tensor]:
    return {
        "u": torch.randn(10, 4),
        "sv": torch.randn(2, 3, 4, 8),
        "selected_start": ints(0, 1, 3),
        "rows": ints([0, 9, -1], [1, 2, 3], [4, 5, 6]),
        "positions": ints([0, 6, 99], [1, 2, 3], [4, 5, 6]),
        "cos": torch.randn(7, 4),
        "sin": torch.randn(7, 4),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("u", torch.randn(10, 4, 1)),
        ("u", torch.randn(10, 4).half()),
        ("sv", torch.randn(2, 3, 5, 8)),
        ("sv", torch.randn(2, 3, 4, 7)),
        ("sv", torch.randn(2, 3, 4)),
        ("sv", torch.randn(2, 3, 4, 8).bfloat16()),
        ("selected_start", ints(0, 3)),
        ("selected_start", ints(0, 1, 4)),
        ("selected_start", ints(0, 1, 2)),
        ("selected_start", ints(1, 2, 3)),
        ("selected_start", ints(0, 4, 3)),
        ("selected_start", ints(0, -(2**31), 3)),
        ("selected_start", torch.tensor([0, 1, 3])),
        ("selected_start", ints()),
        ("rows", ints([0, 10, -1], [1, 2, 3], [4, 5, 6])),
        ("rows", ints([0, 2**31 - 1, -1], [1, 2, 3], [4, 5, 6])),
        ("rows", ints([0, 9], [1, 2], [4, 5])),
        ("rows", arguments()["rows"].long()),
        ("positions", ints([0, 7, 99], [1, 2, 3], [4, 5, 6])),
        ("positions", ints([-1, 6, 99], [1, 2, 3], [4, 5, 6])),
        ("positions", ints([0, 6, 99], [1, 2, 3])),
        ("positions", arguments()["positions"].float()),
        ("cos", torch.randn(7, 8)),
        ("cos", torch.randn(7, 4).bfloat16()),
        ("sin", torch.randn(8, 4)),
        ("sin", torch.randn(7, 4).double()),
    ],
)
def test_refuses_wrong_arguments_by_name(name, value):
    assert plugins.low_rank_key_reconstruct(**arguments()).shape == (3, 3, 8)
    with pytest.raises(RuntimeError, match=rf"low_rank_key_reconstruct: {name} "):
        plugins.low_rank_key_reconstruct(**(arguments() | {name: value}))


def test_opcheck():
    op = torch.ops.kvforge.low_rank_key_reconstruct.default
    cases = [low_rank_key_reconstruct_case(seed) for seed in range(20)]
    for dtype in (torch.float32, torch.bfloat16):  # opcheck cannot clone an empty argument, and compares every key
        whole = (case for case in cases if case[0].dtype == dtype and len(case[3]) and (case[3] >= 0).all())
        torch.library.opcheck(op, next(whole))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_number_of_keys_in_a_tile(head_dim, isas, monkeypatch):
    torch.manual_seed(head_dim)
    for rank, dtype in ((160, torch.bfloat16), (7, torch.bfloat16), (33, torch.float32)):
        u, sv = torch.randn(50, rank).to(dtype), torch.randn(1, 2, rank, head_dim).to(dtype)
        angle = torch.rand(50, head_dim // 2)
        for count in range(1, 14):
            rows = torch.full((40, 2), -1, dtype=torch.int32)
            for head in range(2):
                rows[torch.randperm(40)[:count], head] = torch.randint(0, 50, (count,), dtype=torch.int32)
            args = (u, sv, ints(0, 40), rows, rows.clamp(min=0), angle.cos(), angle.sin())
            want = REFERENCE(*args)[rows >= 0]
            for isa in isas:
                monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                got = plugins.low_rank_key_reconstruct(*args)[rows >= 0]
                # Both round their fp32 sums, and the rotated key to its dtype.
                assert_near(got, want, sum_error(rank, 3) + 2 * unit_roundoff(dtype), (rank, count))
