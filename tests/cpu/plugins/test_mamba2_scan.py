"""Mamba2Scan on CPU: bits that depend on a sequence's own tokens alone, and what it refuses."""

import platform

import pytest
import torch
from torch import Tensor

import plugins
from plugins.mamba2_scan.cases import random_case

HEADS, GROUPS, STATE, DIM = 4, 2, 33, 48
COLUMNS = HEADS * DIM + 2 * GROUPS * STATE


def tokens(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(count, COLUMNS).to(dtype), 2 * torch.randn(count, HEADS)


def of_heads() -> tuple[Tensor, ...]:
    return torch.randn(HEADS), torch.randn(HEADS), torch.randn(HEADS)


def arguments() -> list:
    rows = [torch.tensor(each).int() for each in ([0, 2, 6], [1, -1], [-1, 1, -1, -1, -1, 2])]
    return [*tokens(6, torch.float32), *of_heads(), *rows, torch.randn(3, HEADS, STATE, DIM)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_steps_batch_rows_and_threads(dtype, isa):
    """One sequence in one step, in many, and beside another one: results and every state that is written."""
    xbc, raw = tokens(100, dtype)
    heads, (other, other_raw) = of_heads(), tokens(5, dtype)
    results, states = [], []
    for seed, sizes in enumerate(([100], [1] * 100, [2, 30, 1, 67], [33, 67])):
        torch.set_num_threads(1 + seed % 2)
        pool, row, parts = torch.full((7, HEADS, STATE, DIM), torch.nan), -1, []
        for index, (part, own) in enumerate(zip(xbc.split(sizes), raw.split(sizes), strict=True)):
            write, kept = torch.full((5 + len(part),), -1).int(), (index + seed) % 5
            write[-1], write[4] = kept, 6
            step = torch.cat((other, part)), torch.cat((other_raw, own)), *heads
            starts, read = torch.tensor([0, 5, 5 + len(part)]).int(), torch.tensor([-1, row]).int()
            parts.append(plugins.mamba2_scan(*step, starts, read, write, pool)[5:])
            row = kept
        results.append(torch.cat(parts))
        states.append(pool[[row, 6]])
    torch.set_num_threads(1)
    assert all(torch.equal(each, results[0]) for each in results) and results[0].isfinite().all()
    assert all(torch.equal(each, states[0]) for each in states) and states[0].isfinite().all()


def test_each_token_may_write_its_state():
    """What drafts and snapshots take: rows of tokens in between are those of a step that ends there."""
    xbc, raw = tokens(9, torch.float32)
    heads, none, pool = of_heads(), torch.tensor([-1]).int(), torch.zeros(9, HEADS, STATE, DIM)
    plugins.mamba2_scan(xbc, raw, *heads, torch.tensor([0, 9]).int(), none, torch.arange(9).int(), pool)
    for count in range(1, 10):
        alone, write = torch.zeros_like(pool[:1]), torch.tensor([-1] * (count - 1) + [0]).int()
        starts = torch.tensor([0, count]).int()
        plugins.mamba2_scan(xbc[:count], raw[:count], *heads, starts, none, write, alone)
        assert torch.equal(alone[0], pool[count - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_the_same_without_queries(dtype, isa):
    args = arguments()
    args[0] = args[0].to(dtype)
    pool = args[8].clone()
    plugins.mamba2_scan(*args)
    args[0] = args[0][:, : -GROUPS * STATE]
    got = plugins.mamba2_scan(*args[:8], pool, has_queries=False)
    assert torch.equal(pool, args[8]) and got.shape == (0, HEADS, DIM) and got.dtype == dtype


@pytest.mark.parametrize(
    ("index", "value", "name"),
    [
        (0, torch.randn(6, COLUMNS + 1), "xbc"),
        (0, torch.randn(6, HEADS * DIM), "xbc"),
        (0, torch.randn(6, HEADS * DIM + 2 * 3 * STATE), "xbc"),
        (1, torch.randn(6, 2 * HEADS), "steps"),
        (1, torch.randn(6, HEADS).bfloat16(), "steps"),
        (2, torch.randn(3), "decay_log"),
        (3, torch.randn(3), "step_bias"),
        (4, torch.randn(3), "skip"),
        (5, torch.tensor([0, 3, 2, 6]).int(), "query_start"),
        (6, torch.tensor([0, 3]).int(), "state_read"),
        (7, torch.full((6,), 3).int(), "state_write"),
        (7, torch.full((5,), -1).int(), "state_write"),
        (8, torch.randn(3, HEADS, STATE, DIM).bfloat16(), "state_pool"),
        (8, torch.randn(3, HEADS, DIM, STATE).mT, "state_pool"),
    ],
)
def test_refuses_wrong_arguments_by_name(index, value, name):
    args = arguments()
    args[index] = value
    before = args[8].clone()
    with pytest.raises(RuntimeError, match=rf"mamba2_scan: {name} "):
        plugins.mamba2_scan(*args)
    assert torch.equal(args[8], before)


def test_a_number_that_is_none_stays_in_its_sequence():
    args = arguments()
    want = plugins.mamba2_scan(*args[:8], args[8].clone())
    args[0][1, 0] = torch.nan
    got = plugins.mamba2_scan(*args)
    assert torch.equal(got[2:], want[2:]) and torch.equal(got[0], want[0]) and got[1].isnan().any()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other CPUs take them as fast as others")
def test_subnormal_numbers_are_zeros_within_it_alone(isa):
    args = arguments()
    args[0].zero_()
    args[1].fill_(1.0)
    args[2:4] = torch.full((2, HEADS), 2.0)  # decays of 1.7e-10
    args[8].fill_(1e-20)
    plugins.mamba2_scan(*args)
    assert not args[8][1].any() and (torch.full((1,), 1e-30) * 1e-10).item() > 0  # row 1: 3e-40


def test_opcheck():
    for seed in range(6):
        torch.library.opcheck(torch.ops.kvforge.mamba2_scan.default, random_case(seed, small=True))
