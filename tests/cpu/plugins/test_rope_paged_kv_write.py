"""RopePagedKvWrite on CPU against its reference, and what it refuses."""

import pytest
import torch

import plugins
from plugins.random_cases import rope_paged_kv_write_case

REFERENCE = plugins.OPERATORS["rope_paged_kv_write"].reference
NUM_CASES, NUM_BLOCKS = 320, 8


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_equals_the_reference_bit_for_bit(block, isas, monkeypatch):
    for seed in range(block, NUM_CASES, NUM_BLOCKS):
        *inputs, k_pool, v_pool = rope_paged_kv_write_case(seed)
        expected = k_pool.clone(), v_pool.clone()
        REFERENCE(*inputs, *expected)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            pools = k_pool.clone(), v_pool.clone()
            result = plugins.rope_paged_kv_write(*inputs, *pools)
            assert result[0] is pools[0] and result[1] is pools[1]
            for got, want in zip(pools, expected, strict=True):
                assert torch.equal(bits(got), bits(want)), (seed, isa)


def test_writes_views_of_one_allocation_and_nothing_else():
    *inputs, k_pool, v_pool = rope_paged_kv_write_case(1)
    both = torch.full((k_pool.shape[0], 2, *k_pool.shape[1:]), 7.0)
    plugins.rope_paged_kv_write(*inputs, both[:, 0], both[:, 1])
    k_pool, v_pool = (torch.full(k_pool.shape, 7.0) for _ in range(2))
    REFERENCE(*inputs, k_pool, v_pool)
    assert torch.equal(both, torch.stack((k_pool, v_pool), dim=1))


def arguments() -> dict[str, torch.Tensor]:
    return {
        "k": torch.randn(3, 2, 8),
        "v": torch.randn(3, 2, 8),
        "cos": torch.randn(3, 4),
        "sin": torch.randn(3, 4),
        "slot_mapping": torch.tensor([0, 5, -1], dtype=torch.int32),
        "k_pool": torch.zeros(2, 4, 2, 8),
        "v_pool": torch.zeros(2, 4, 2, 8),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", torch.randn(3, 2, 6)),
        ("k", torch.randn(3, 16)),
        ("k", torch.randn(3, 2, 8).double()),
        ("v", torch.randn(2, 2, 8)),
        ("v", torch.randn(3, 2, 8).bfloat16()),
        ("cos", torch.randn(3, 8)),
        ("sin", torch.randn(3, 4).bfloat16()),
        ("slot_mapping", torch.zeros(3, dtype=torch.int64)),
        ("slot_mapping", torch.zeros(4, dtype=torch.int32)),
        ("slot_mapping", torch.tensor([0, 8, 1], dtype=torch.int32)),
        ("slot_mapping", torch.tensor([0, 2**31 - 1, 1], dtype=torch.int32)),
        ("k_pool", torch.zeros(2, 4, 2, 8).half()),
        ("v_pool", torch.zeros(2, 5, 2, 8)),
        ("v_pool", torch.zeros(2, 4, 2, 8).bfloat16()),
        ("v_pool", torch.zeros(2, 4, 8, 2).transpose(2, 3)),
    ],
)
def test_refuses_wrong_arguments_by_name_before_writing(name, value):
    good = arguments()
    wrong = good | {name: value}
    with pytest.raises(RuntimeError, match=rf"rope_paged_kv_write: {name} "):
        plugins.rope_paged_kv_write(**wrong)
    assert not good["k_pool"].any() and not good["v_pool"].any()


def test_refuses_an_odd_head_dim():
    pool = torch.zeros(2, 4, 2, 7)
    k = torch.randn(3, 2, 7)
    with pytest.raises(RuntimeError, match="k_pool must have an even head_dim"):
        plugins.rope_paged_kv_write(**(arguments() | {"k": k, "v": k, "k_pool": pool, "v_pool": pool}))


def test_opcheck():
    op = torch.ops.kvforge.rope_paged_kv_write.default
    for seed in (0, 4):  # not empty: opcheck cannot clone an empty argument
        torch.library.opcheck(op, rope_paged_kv_write_case(seed))
