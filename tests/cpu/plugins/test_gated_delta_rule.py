"""GatedDeltaRule on CPU: bits that depend on a sequence's own tokens alone, and what it refuses."""

import platform

import pytest
import torch
from torch import Tensor

import plugins
from plugins.gated_delta_rule.cases import difference, random_case

HEADS, KEYS, VALUES = 4, 33, 48


def tokens(count: int, dtype: torch.dtype, decays: int = 1) -> tuple[Tensor, Tensor]:
    """qkv and gates of two key heads and four value heads, each with so many decays."""
    qkv = torch.randn(count, 2 * 2 * KEYS + HEADS * VALUES).to(dtype)
    return qkv, 2 * torch.randn(count, HEADS * (1 + decays))


def arguments(decays: int = 1) -> list:
    rows = [torch.tensor(each).int() for each in ([0, 2, 6], [1, -1], [-1, 1, -1, -1, -1, 2])]
    return [
        *tokens(6, torch.float32, decays),
        torch.randn(HEADS),
        torch.randn(HEADS * decays),
        *rows,
        torch.randn(3, HEADS, KEYS, VALUES),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", [1, KEYS])
def test_bits_do_not_depend_on_steps_batch_rows_and_threads(decays, dtype, isa):
    """One sequence in one step, in many, and beside another one: results and every state that is written."""
    qkv, gates = tokens(40, dtype, decays)
    heads = torch.randn(HEADS), torch.randn(HEADS * decays)
    other, other_gates = tokens(5, dtype, decays)
    results, states = [], []
    for seed, sizes in enumerate(([40], [1] * 40, [2, 17, 1, 20], [3, 37])):
        torch.set_num_threads(1 + seed % 2)
        pool, row, parts = torch.full((7, HEADS, KEYS, VALUES), torch.nan), -1, []
        for index, (part, own) in enumerate(zip(qkv.split(sizes), gates.split(sizes), strict=True)):
            write, kept = torch.full((5 + len(part),), -1).int(), (index + seed) % 5
            write[-1], write[4] = kept, 6
            step = torch.cat((other, part)), torch.cat((other_gates, own)), *heads
            starts, read = torch.tensor([0, 5, 5 + len(part)]).int(), torch.tensor([-1, row]).int()
            parts.append(plugins.gated_delta_rule(*step, starts, read, write, pool)[5:])
            row = kept
        results.append(torch.cat(parts))
        states.append(pool[[row, 6]])
    torch.set_num_threads(1)
    assert all(torch.equal(each, results[0]) for each in results) and results[0].isfinite().all()
    assert all(torch.equal(each, states[0]) for each in states) and states[0].isfinite().all()


def test_each_token_may_write_its_state():
    """What drafts and snapshots take: rows of tokens in between are those of a step that ends there."""
    qkv, gates = tokens(9, torch.float32)
    heads, none = (torch.randn(HEADS), torch.randn(HEADS)), torch.tensor([-1]).int()
    pool = torch.zeros(9, HEADS, KEYS, VALUES)
    plugins.gated_delta_rule(qkv, gates, *heads, torch.tensor([0, 9]).int(), none, torch.arange(9).int(), pool)
    for count in range(1, 10):
        alone, write = torch.zeros_like(pool[:1]), torch.tensor([-1] * (count - 1) + [0]).int()
        starts = torch.tensor([0, count]).int()
        plugins.gated_delta_rule(qkv[:count], gates[:count], *heads, starts, none, write, alone)
        assert torch.equal(alone[0], pool[count - 1])


def test_one_decay_is_as_many_that_are_equal(isa):
    """But for rounding; and gates of -inf leave the state as it is, bit by bit."""
    args = arguments()
    args[1][2, :] = -torch.inf
    gates, bias, pool = args[1][:, HEADS:, None], args[3][:, None], args[7].clone()
    each = [torch.cat((args[1][:, :HEADS], gates.expand(-1, -1, KEYS).flatten(1)), 1), args[2]]
    each.append(bias.expand(-1, KEYS).flatten())
    want = plugins.gated_delta_rule(*args)
    got = plugins.gated_delta_rule(args[0], *each, *args[4:7], pool)
    assert not difference(args, [got, pool], [want, args[7]])
    one = torch.tensor([0, 6]).int(), torch.tensor([1]).int(), torch.tensor([-1] * 5 + [0]).int()
    for of_gates in ([args[1], *args[2:4]], each):
        plugins.gated_delta_rule(args[0], torch.full_like(of_gates[0], -torch.inf), *of_gates[1:], *one, pool)
        assert torch.equal(pool[0], pool[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", [1, KEYS])
def test_states_are_the_same_without_queries(decays, dtype, isa):
    args = arguments(decays)
    args[0] = args[0].to(dtype)
    pool = args[7].clone()
    plugins.gated_delta_rule(*args)
    args[0] = args[0][:, 2 * KEYS :]
    got = plugins.gated_delta_rule(*args[:7], pool, has_queries=False)
    assert torch.equal(pool, args[7]) and got.shape == (0, HEADS, VALUES) and got.dtype == dtype


@pytest.mark.parametrize(
    ("index", "value", "name"),
    [
        (0, torch.randn(6, 2 * 2 * KEYS + HEADS * VALUES + 1), "qkv"),
        (0, torch.randn(6, HEADS * VALUES), "qkv"),
        (0, torch.randn(6, 2 * 3 * KEYS + HEADS * VALUES), "qkv"),
        (1, torch.randn(6, HEADS), "gates"),
        (1, torch.randn(6, 2 * HEADS).bfloat16(), "gates"),
        (2, torch.randn(3), "decay_log"),
        (3, torch.randn(3), "decay_bias"),
        (4, torch.tensor([0, 3, 2, 6]).int(), "query_start"),
        (5, torch.tensor([0, 3]).int(), "state_read"),
        (6, torch.full((6,), 3).int(), "state_write"),
        (6, torch.full((5,), -1).int(), "state_write"),
        (7, torch.randn(3, HEADS, KEYS, VALUES).bfloat16(), "state_pool"),
        (7, torch.randn(3, HEADS, VALUES, KEYS).mT, "state_pool"),
    ],
)
def test_refuses_wrong_arguments_by_name(index, value, name):
    args = arguments()
    args[index] = value
    before = args[7].clone()
    with pytest.raises(RuntimeError, match=rf"gated_delta_rule: {name} "):
        plugins.gated_delta_rule(*args)
    assert torch.equal(args[7], before)


def test_a_number_that_is_none_stays_in_its_sequence():
    args = arguments()
    want = plugins.gated_delta_rule(*args[:7], args[7].clone())
    args[0][1, 0] = torch.nan
    got = plugins.gated_delta_rule(*args)
    assert torch.equal(got[2:], want[2:]) and torch.equal(got[0], want[0]) and got[1].isnan().any()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other CPUs take them as fast as others")
def test_subnormal_numbers_are_zeros_within_it_alone(isa):
    args = arguments()
    args[0].zero_()
    args[1].fill_(1.0)
    args[2:4] = torch.full((2, HEADS), 2.0)  # decays of 1.7e-10
    args[7].fill_(1e-20)
    plugins.gated_delta_rule(*args)
    assert not args[7][1].any() and (torch.full((1,), 1e-30) * 1e-10).item() > 0  # row 1: 3e-40


def test_opcheck():
    for seed in range(6):
        torch.library.opcheck(torch.ops.kvforge.gated_delta_rule.default, random_case(seed, small=True))
