"""EvictSlots on CPU: who stays and where, what a layout of pages must not change, and what it refuses."""

import math

import pytest
import torch
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

import plugins
from plugins.cases import FORMATS
from plugins.evict_slots.cases import random_case
from tests.support.operators.backends import run_cpu
from tests.support.operators.cases import difference, fresh, reference

NAME = "evict_slots"
LISTS = ("keep", "kv_length", "sealed", "shift")


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lane(scores: list[float], keep: int, sealed: int, shift: int, positions: list[int]) -> dict[str, torch.Tensor]:
    """One sequence with one KV head and pages of two slots, whose K are 0, 1, 2, ... and V and mass likewise."""
    pages = -(-len(scores) // 2)
    rows = torch.arange(2.0 * pages).view(pages, 2, 1)
    position = torch.full((2 * pages,), -7, dtype=torch.int32)
    position[:sealed] = ints(*positions)
    return {
        "score": torch.tensor([[scores]], dtype=torch.float32),
        **dict(zip(LISTS, (ints(keep), ints(len(scores)), ints(sealed), ints(shift)), strict=True)),
        "page_table": torch.arange(pages).int()[None],
        "state_table": torch.arange(pages).int()[None],
        "position": position.view(pages, 2, 1),
        "k_pool": rows[..., None].clone(),
        "v_pool": rows[..., None] + 100,
        "mass": rows + 200,
        "squares": rows + 300,
    }


def evict(args: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
    """Which slots the rows came from, once all agree on it, and the positions."""
    plugins.evict_slots(**args)
    came_from = args["k_pool"].flatten().int().tolist()
    for name, added in (("v_pool", 100), ("mass", 200), ("squares", 300)):
        assert (args[name].flatten() - added).int().tolist() == came_from, name
    return came_from, args["position"].flatten().tolist()


def test_survivors_move_into_holes_in_their_order():
    args = lane([5, 1, 4, 0, 3, 2], keep=4, sealed=4, shift=10, positions=[0, 1, 2, 3])
    assert evict(args) == ([0, 4, 2, 5, 4, 5], [0, 14, 2, 15, -7, -7])


def test_of_equal_scores_the_larger_position_stays():
    args = lane([1, 1, -0.0, 0.0], keep=1, sealed=4, shift=0, positions=[9, 3, 5, 8])
    assert evict(args)[1] == [9, 3, 5, 8]
    args = lane([0.0, -0.0, 0.0, 0.0], keep=2, sealed=4, shift=0, positions=[1, 7, 9, 3])
    assert evict(args) == ([2, 1, 2, 3], [9, 7, 9, 3])


def test_not_a_number_is_the_lowest_and_equals_minus_infinity():
    args = lane([math.nan, math.inf, -math.inf, -3e38], keep=3, sealed=4, shift=0, positions=[0, 1, 2, 3])
    assert evict(args) == ([3, 1, 2, 3], [3, 1, 2, 3])
    args = lane([math.nan, math.inf, -math.inf, -3e38], keep=3, sealed=4, shift=0, positions=[2, 1, 0, 3])
    assert evict(args) == ([0, 1, 3, 3], [2, 1, 3, 3])


@pytest.mark.parametrize("keep", [0, 5])
def test_nothing_or_all_stays(keep):
    args = lane([1, 2, 3, 4, 5], keep=keep, sealed=2, shift=4, positions=[1, 3])
    assert evict(args) == ([0, 1, 2, 3, 4, 5], [1, 3, *([6, 7, 8] if keep else [-7] * 3), -7])


@pytest.mark.parametrize("name", ["kv_length", "state_table"])
def test_nothing_to_do(name):
    args = lane([3, 2, 1], keep=1, sealed=0, shift=0, positions=[])
    args |= {"keep": ints(99), "page_table": ints([999, 999])}
    args[name] = args[name] * 0 - int(name == "state_table")
    assert evict(args) == ([0, 1, 2, 3], [-7] * 4)


def test_repeated_evictions_are_those_of_a_list():
    """Every lane is a list of (position, row) to which tokens are appended and from which the worst are taken."""
    gen = torch.Generator().manual_seed(0)
    kv_heads, page_size, width = 3, 4, 12
    table, states = (torch.randperm(20, generator=gen)[:width].int()[None] for _ in range(2))
    pool = torch.zeros(20, page_size, kv_heads, 1)
    values, mass = pool.clone(), torch.zeros(20, page_size, kv_heads)
    position = torch.zeros(20, page_size, kv_heads, dtype=torch.int32)
    lanes: list[list[int]] = [[] for _ in range(kv_heads)]
    tokens = kept = 0
    for _ in range(40):
        new = int(torch.randint(1, 9, (), generator=gen))
        length = kept + new
        slot = torch.arange(kept, length)
        number = torch.arange(tokens, tokens + new)
        pool[table[0, slot // page_size], slot % page_size] = number.float()[:, None, None]
        mass[states[0, slot // page_size], slot % page_size] = number.float()[:, None]
        score = torch.randint(0, 6, (1, kv_heads, length), generator=gen).float()
        keep = max(0, min(length, 30) - int(torch.randint(0, 4, (), generator=gen)))
        numbers = (ints(n) for n in (keep, length, kept, tokens - kept))
        plugins.evict_slots(score, *numbers, table, states, position, pool, values, mass=mass)
        slot = torch.arange(keep)
        for head, held in enumerate(lanes):
            held.extend(range(tokens, tokens + new))
            best = sorted(range(length), key=lambda i: (score[0, head, i], held[i]), reverse=True)[:keep]
            stay = [held[i] for i in sorted(best)]
            in_place = {i: held[i] for i in best if i < keep}
            rest = [held[i] for i in sorted(best) if i >= keep]
            held[:] = [in_place[i] if i in in_place else rest.pop(0) for i in range(keep)]
            assert sorted(held) == sorted(stay)
            assert position[states[0, slot // page_size], slot % page_size, head].tolist() == held
            assert pool[table[0, slot // page_size], slot % page_size, head, 0].tolist() == held
            assert mass[states[0, slot // page_size], slot % page_size, head].tolist() == held
        tokens, kept = tokens + new, keep
    assert tokens > 100


@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_pages_changes_nothing(seed):
    args = list(random_case(seed))
    gen = torch.Generator().manual_seed(seed)
    want = run_cpu(NAME, tuple(args))
    orders = []
    for table, tensors in ((5, (8, 9, 10, 11)), (6, (7, 12, 13))):
        order = torch.randperm(len(args[tensors[0]]), generator=gen)
        pages = args[table].clamp(0, len(order) - 1).long()
        inside = (args[table] >= 0) & (args[table] < len(order))
        args[table] = torch.where(inside, order.argsort()[pages].int(), args[table])
        for i in tensors:
            args[i] = None if args[i] is None else args[i][order]
            orders += [order] if args[i] is not None else []
    order_of = {7: orders[-1]} | {i: orders[0] for i in (8, 9, 10, 11)} | {i: orders[-1] for i in (12, 13)}
    places = [i for i in range(7, 14) if args[i] is not None]
    expected = [tensor[order_of[i]] for i, tensor in zip(places, want, strict=True)]
    assert difference(NAME, tuple(args), run_cpu(NAME, tuple(args)), expected) is None


@pytest.mark.parametrize("seed", range(30))
def test_one_sequence_at_a_time_gives_the_same(seed):
    args = random_case(seed)
    want, alone = run_cpu(NAME, args), fresh(NAME, args)
    for s in range(len(args[0])):
        plugins.evict_slots(*(x[s : s + 1] for x in alone[:7]), *alone[7:])
    assert difference(NAME, args, [x for x in alone[7:] if x is not None], want) is None


def test_the_number_of_threads_changes_nothing():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        gen = torch.Generator().manual_seed(0)
        score, table = torch.randn(6, 4, 2048, generator=gen), torch.randperm(6 * 64, generator=gen).view(6, 64).int()
        numbers = [torch.full((6,), n, dtype=torch.int32) for n in (500, 2048, 0, 0)]
        pools = [torch.randn(6 * 64, 32, 4, 8, generator=gen) for _ in range(2)]
        args = (score, *numbers, table, table, torch.zeros(6 * 64, 32, 4, dtype=torch.int32), *pools)
        args = (*args, None, None, None, None)
        assert difference(NAME, args, run_cpu(NAME, args), reference(NAME, args)) is None
    finally:
        torch.set_num_threads(threads)


def arguments() -> dict[str, torch.Tensor]:
    return lane([3, 2, 1, 5, 4], keep=3, sealed=2, shift=0, positions=[0, 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("score", torch.zeros(1, 2, 5)),
        ("score", torch.zeros(1, 1, 5, dtype=torch.float64)),
        ("score", torch.zeros(1, 5)),
        ("keep", ints(-1)),
        ("keep", ints(6)),
        ("keep", ints(3, 3)),
        ("kv_length", ints(-1)),
        ("kv_length", ints(6)),
        ("kv_length", ints(5).long()),
        ("sealed", ints(-1)),
        ("sealed", ints(6)),
        ("shift", ints([0])),
        ("page_table", ints([0, 1])),
        ("page_table", ints([0, 1, 3])),
        ("page_table", ints([0, -1, 2])),
        ("page_table", ints(0, 1, 2)),
        ("state_table", ints([0, 1])),
        ("state_table", ints([0, 1, 3])),
        ("state_table", ints([0, -1, 2])),
        ("position", torch.zeros(3, 2, 1)),
        ("position", torch.zeros(3, 4, 1, dtype=torch.int32)),
        ("k_pool", torch.zeros(3, 2, 1, 1, dtype=torch.float64)),
        ("v_pool", torch.zeros(3, 2, 1, 2)),
        ("k_scales", torch.zeros(3, 2, 1)),
        ("mass", torch.zeros(2, 2, 1)),
        ("squares", torch.zeros(3, 2, 1, dtype=torch.float64)),
    ],
)
def test_refuses_wrong_arguments_by_name_before_any_write(name, value):
    plugins.evict_slots(**arguments())
    wrong = arguments() | {name: value}
    if name == "k_scales":
        wrong["v_scales"] = value
    before = {key: tensor.clone() for key, tensor in wrong.items()}
    with pytest.raises(RuntimeError, match=rf"evict_slots: {name} "):
        plugins.evict_slots(**wrong)
    assert all(torch.equal(wrong[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep", ints(6)),
        ("kv_length", ints(6)),
        ("sealed", ints(-1)),
        ("page_table", ints([0, 1])),
        ("page_table", ints([0, 1, 3])),
        ("state_table", ints([0, -1, 2])),
    ],
)
def test_the_definition_refuses_the_same_values(name, value):
    wrong = arguments() | {name: value}
    with pytest.raises(RuntimeError) as ours:
        plugins.OPERATORS[NAME].reference(**wrong)
    with pytest.raises(RuntimeError) as kernels:
        plugins.evict_slots(**wrong)
    assert str(ours.value) == str(kernels.value).splitlines()[0]


@pytest.mark.parametrize("kind", range(len(FORMATS)))
def test_opcheck(kind):
    args = next(case for seed in range(kind, 99, len(FORMATS)) if len((case := random_case(seed, small=True))[0]))
    # test_schema compares copies of arguments by arithmetic that torch does not have for e4m3.
    checks = [check for check in ALL_TEST_UTILS if args[8].dtype != torch.float8_e4m3fn or check != "test_schema"]
    torch.library.opcheck(torch.ops.kvforge.evict_slots.default, fresh(NAME, args), test_utils=checks)
