"""LowRankKeyReconstruct on CPU against its reference, its invariances, and what it refuses."""

import pytest
import torch

import plugins
from plugins.low_rank_key_reconstruct.cases import is_listed
from plugins.low_rank_key_reconstruct.cases import random_case as low_rank_key_reconstruct_case
from tests.support.rounding import assert_near, sum_error, unit_roundoff

REFERENCE = plugins.OPERATORS["low_rank_key_reconstruct"].reference


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def listed_keys(args: tuple, keys: torch.Tensor) -> torch.Tensor:
    """The keys before the ends of the lists."""
    return keys[is_listed(args[2], args[3]).repeat_interleave(args[-1], dim=-1)]


def test_a_key_does_not_depend_on_the_others(isas, monkeypatch):
    for seed in range(40):
        u, sv, slot, chunks, table, cos, sin, size = low_rank_key_reconstruct_case(seed)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            together = plugins.low_rank_key_reconstruct(u, sv, slot, chunks, table, cos, sin, size)
            for s, head, i in is_listed(slot, chunks).nonzero().tolist()[::13]:
                of = slice(s, s + 1)
                one = torch.full_like(chunks[of, :, :1], -1)
                one[0, head] = chunks[s, head, i]
                alone = plugins.low_rank_key_reconstruct(u, sv, slot[of], one, table[of], cos, sin, size)
                beside = together[s, head, i * size : (i + 1) * size]
                assert torch.equal(alone[0, head], beside), (seed, isa, s, head, i)


def test_the_number_of_threads_changes_no_bit():
    threads = torch.get_num_threads()
    try:
        for seed in range(30):
            args = low_rank_key_reconstruct_case(seed)
            results = []
            for count in (1, 3):
                torch.set_num_threads(count)
                results.append(listed_keys(args, plugins.low_rank_key_reconstruct(*args)))
            assert torch.equal(*results), seed
    finally:
        torch.set_num_threads(threads)


def test_strided_arguments_are_taken():
    cases = (low_rank_key_reconstruct_case(seed) for seed in range(100))
    args = next(c for c in cases if c[3].shape[2] > 1 and min(c[1].shape) > 1 and is_listed(*c[2:4]).any())
    want = listed_keys(args, plugins.low_rank_key_reconstruct(*args))
    assert want.numel()
    *tensors, size = args
    views = [torch.stack((x, x), dim=-1)[..., 0] for x in tensors]
    assert not any(x.is_contiguous() for x in views if x.numel() > 1)
    assert torch.equal(listed_keys(args, plugins.low_rank_key_reconstruct(*views, size)), want)


def test_what_is_behind_the_end_of_a_list_is_not_read():
    args = arguments() | {"chunks": ints([[-1, 2**31 - 1], [1, -1]], [[-1, 9], [2, -1]])}
    assert plugins.low_rank_key_reconstruct(**args).shape == (2, 2, 4, 8)
    args |= {"slot": ints(-5, -1), "chunks": torch.full((2, 2, 2), 2**31 - 1, dtype=torch.int32)}
    assert plugins.low_rank_key_reconstruct(**args).shape == (2, 2, 4, 8)


def arguments() -> dict[str, object]:
    """Two sequences with two KV heads, chunks of 2 in pages of 4."""
    return {
        "u": torch.randn(3, 4, 5),
        "sv": torch.randn(2, 2, 5, 8),
        "slot": ints(1, 0),
        "chunks": ints([[0, 3], [1, -1]], [[-1, 9], [2, -1]]),
        "shadow_table": ints([2, 0], [9, 1]),
        "cos": torch.randn(8, 4),
        "sin": torch.randn(8, 4),
        "chunk_size": 2,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("u", torch.randn(12, 5)),
        ("u", torch.randn(3, 4, 5).half()),
        ("sv", torch.randn(2, 2, 4, 8)),
        ("sv", torch.randn(2, 2, 5, 7)),
        ("sv", torch.randn(2, 2, 5)),
        ("sv", torch.randn(2, 2, 5, 8).bfloat16()),
        ("slot", ints(2, 0)),
        ("slot", ints(1)),
        ("slot", ints([1, 0])),
        ("slot", torch.tensor([1, 0])),
        ("slot", ints()),
        ("chunks", ints([[0, 4], [1, -1]], [[-1, 9], [2, -1]])),
        ("chunks", ints([[0, 2**31 - 1], [1, -1]], [[-1, 9], [2, -1]])),
        ("chunks", ints([[0, 3]], [[-1, 9]])),
        ("chunks", ints([0, 3], [1, -1])),
        ("chunks", torch.zeros(2, 2, 2, dtype=torch.int64)),
        ("chunks", torch.zeros(2, 2, 2)),
        ("shadow_table", ints([2, 3], [9, 1])),
        ("shadow_table", ints([2, -1], [9, 1])),
        ("shadow_table", ints([2, -(2**31)], [9, 1])),
        ("shadow_table", ints([2, 0], [9, 9])),
        ("shadow_table", ints([2, 0])),
        ("shadow_table", torch.tensor([[2, 0], [9, 1]])),
        ("cos", torch.randn(8, 8)),
        ("cos", torch.randn(8, 4).bfloat16()),
        ("sin", torch.randn(7, 4)),
        ("sin", torch.randn(8, 4).double()),
        ("chunk_size", 0),
        ("chunk_size", 3),
    ],
)
def test_refuses_wrong_arguments_by_name(name, value):
    assert plugins.low_rank_key_reconstruct(**arguments()).shape == (2, 2, 4, 8)
    with pytest.raises(RuntimeError, match=rf"low_rank_key_reconstruct: {name} "):
        plugins.low_rank_key_reconstruct(**(arguments() | {name: value}))


def test_a_chunk_past_the_tables_of_angles_is_refused():
    angles = {"cos": torch.randn(7, 4), "sin": torch.randn(7, 4)}
    with pytest.raises(RuntimeError, match="low_rank_key_reconstruct: chunks holds 3 but cos and sin have 7 positions"):
        plugins.low_rank_key_reconstruct(**(arguments() | angles))


def test_opcheck():
    op = torch.ops.kvforge.low_rank_key_reconstruct.default
    for dtype in (torch.float32, torch.bfloat16):  # opcheck compares every key
        whole = {name: x.to(dtype) if name in ("u", "sv") else x for name, x in arguments().items()}
        whole |= {"chunks": ints([[0, 3], [1, 2]], [[2, 3], [2, 3]]), "shadow_table": ints([2, 0], [0, 1])}
        torch.library.opcheck(op, tuple(whole.values()))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_number_of_keys_in_a_tile(head_dim, isas, monkeypatch):
    torch.manual_seed(head_dim)
    for rank, dtype in ((160, torch.bfloat16), (7, torch.bfloat16), (33, torch.float32)):
        u, sv = torch.randn(5, 10, rank).to(dtype), torch.randn(1, 2, rank, head_dim).to(dtype)
        angle = torch.rand(50, head_dim // 2)
        for count in range(1, 14):
            chunks = torch.full((1, 2, 40), -1, dtype=torch.int32)
            for head in range(2):
                chunks[0, head, :count] = torch.randint(0, 50, (count,), dtype=torch.int32)
            args = (u, sv, ints(0), chunks, torch.randperm(5).int()[None], angle.cos(), angle.sin(), 1)
            want = listed_keys(args, REFERENCE(*args))
            for isa in isas:
                monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                got = listed_keys(args, plugins.low_rank_key_reconstruct(*args))
                # Both round their fp32 sums, and the rotated key to its dtype.
                assert_near(got, want, sum_error(rank, 3) + 2 * unit_roundoff(dtype), (rank, count))
