"""AttentionMass on CPU: what each kind keeps, its invariances, bad numbers, and what it refuses."""

import pytest
import torch
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

import plugins
from plugins.attention_mass.cases import random_case
from plugins.attention_mass.reference import BELOW, LARGEST_WEIGHT, SUM, SUM_AND_SQUARES
from plugins.kv_quantization import LARGEST
from tests.support.operators.cases import fresh
from tests.support.operators.mass_steps import NAME, alone, by_name, in_steps, same, splittable
from tests.support.rounding import assert_within, gamma

ROUNDINGS = 20
"""Of an equal key's statistic: the share of a total, the mean of two heads, a square, two additions, and as many again
of what is expected."""
KINDS = (SUM, SUM_AND_SQUARES, BELOW, LARGEST_WEIGHT)
each_kind = pytest.mark.parametrize("kind", KINDS)


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(args: dict) -> list[torch.Tensor]:
    """What the operator writes, into copies."""
    return list(plugins.attention_mass(*fresh(NAME, tuple(args.values()))))


def uniform(queries: int, slots: int, kind: int, scored: int, memory: float) -> dict:
    """One sequence of `queries` over equal keys, so that each gives the same to all slots that it sees."""
    page_size, pages = 4, -(-slots // 4)
    table = torch.arange(pages).int()[None]
    return {
        "q": torch.randn(queries, 4, 8),
        "k_pool": torch.ones(pages, page_size, 2, 8),
        "query_start": ints(0, queries),
        "kv_length": ints(slots),
        "page_table": table,
        "state_table": table.flip(1),
        "skipped": ints(0),
        "scored": ints(scored),
        "scale": 0.5,
        "kind": kind,
        "mass": torch.full((pages, page_size, 2), memory),
        "squares": torch.full((pages, page_size, 2), memory) if kind == SUM_AND_SQUARES else None,
        "k_scales": None,
        "k_scale": 1.0,
    }


def test_what_each_kind_keeps(isas, monkeypatch):
    """Two queries over 7 and 8 equal keys; the first three slots go on from 2, the others start at 0."""
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        past = torch.tensor([2.0, 2, 2, 0, 0, 0, 0, 0])
        both = torch.tensor([1.0] * 7 + [0])
        sums, squares = both / 7 + 1 / 8, both / 49 + 1 / 64
        wanted = {SUM: [sums], SUM_AND_SQUARES: [sums, squares], BELOW: [0 * both]}
        wanted = {kind: [past + x for x in given] for kind, given in wanted.items()}
        wanted[LARGEST_WEIGHT] = [past.maximum(both / 7).maximum(torch.tensor(1 / 8))]
        for kind, want in wanted.items():
            for got, expected in zip(run(uniform(2, 8, kind, 3, 2.0)), want, strict=True):
                slots = got.flip(0).flatten(0, 1)
                wanted_slots = expected[:, None].expand(8, 2)
                assert_within(slots, wanted_slots, gamma(ROUNDINGS) * wanted_slots, (isa, kind))


def test_counts_the_queries_that_give_less_than_the_mean():
    args = uniform(3, 9, BELOW, 0, float("nan"))
    args["k_pool"] = args["k_pool"] * 0
    args["k_pool"][0, 1, 0], args["k_pool"][1, 2, 1] = 5.0, 5.0  # slot 1 of head 0, slot 6 of head 1
    args["q"] = torch.ones(3, 4, 8)
    slots = run(args)[0].flip(0).flatten(0, 1)
    assert slots[:9, 0].tolist() == [3, 0, 3, 3, 3, 3, 3, 2, 1]
    assert slots[:9, 1].tolist() == [3, 3, 3, 3, 3, 3, 0, 2, 1]


@each_kind
def test_where_no_query_is_observed_nothing_is_written(kind):
    wanted = uniform(2, 8, kind, 0, 7.0)
    for change in (
        {"skipped": ints(2)},
        {"skipped": ints(9)},
        {"state_table": ints([-1, 0])},
        {"q": torch.randn(0, 4, 8), "query_start": ints(0, 0)},
    ):
        assert all((written == 7.0).all() for written in run(wanted | change))
    none = {"q": torch.randn(0, 4, 8), "query_start": ints(0), "kv_length": ints(), "skipped": ints()}
    tables = {name: torch.zeros(0, 2, dtype=torch.int32) for name in ("page_table", "state_table")}
    assert all((written == 7.0).all() for written in run(wanted | none | tables | {"scored": ints()}))


def test_bits_do_not_depend_on_how_queries_come_in_steps(isas, monkeypatch):
    checked = 0
    for seed in range(60):
        for one in splittable(by_name(seed, kind=KINDS[seed % 4])):
            count = len(one["q"])
            for isa in isas:
                monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                whole = run(one)
                for lengths in ([1] * count, [count // 2, count - count // 2], [1, count - 2, 1]):
                    assert same(in_steps(one, lengths, plugins.attention_mass), whole), (seed, isa, lengths)
                    checked += 1
    assert checked > 60


def moved(args: dict, s: int, table: str, names: tuple[str, ...]) -> dict:
    """The one sequence s with the pages of `names` in another order."""
    order = torch.randperm(len(args[names[0]]))
    used = -(-int(args["kv_length"][s]) // args["k_pool"].shape[1])
    entries = args[table][s : s + 1].clone()
    if entries[0, 0] >= 0:
        entries[0, :used] = order.argsort()[entries[0, :used].long()].int()
    return {table: entries} | {name: args[name][order] for name in names if args[name] is not None}, order


def test_a_sequence_does_not_depend_on_its_neighbours_pages_or_threads(isas, monkeypatch):
    threads = torch.get_num_threads()
    try:
        for seed in range(40):
            args = by_name(seed, kind=KINDS[seed % 4])
            monkeypatch.setenv("KVFORGE_CPU_ISA", isas[seed % len(isas)])
            torch.set_num_threads(3)
            together = run(args)
            torch.set_num_threads(1)
            assert same(run(args), together), seed
            for s in range(len(args["kv_length"])):
                keys, _ = moved(args, s, "page_table", ("k_pool", "k_scales"))
                states, order = moved(args, s, "state_table", ("mass", "squares"))
                places = args["state_table"][s], args["kv_length"][s]
                used = -(-int(places[1]) // args["k_pool"].shape[1])
                if places[0][0] < 0:
                    continue
                pages = places[0][:used].long()
                got = run(alone(args, s) | keys | states)
                assert same([x[order.argsort()][pages] for x in got], [x[pages] for x in together]), (seed, s)
    finally:
        torch.set_num_threads(threads)


@each_kind
def test_more_weights_than_are_held_at_once(kind, isas, monkeypatch):
    """600 queries of a sequence over 40 thousand slots: their weights are computed in several parts."""
    torch.manual_seed(0)
    page_size, slots, queries = 1000, 40_000, 600
    table = torch.randperm(40).int()[None]
    args = uniform(queries, 8, kind, 0, 0.0) | {
        "q": torch.randn(queries, 2, 16).bfloat16(),
        "k_pool": torch.randn(40, page_size, 1, 16).bfloat16(),
        "kv_length": ints(slots),
        "page_table": table,
        "state_table": table.flip(1),
        "mass": torch.full((40, page_size, 1), float("nan")),
        "squares": torch.full((40, page_size, 1), float("nan")) if kind == SUM_AND_SQUARES else None,
    }
    monkeypatch.setenv("KVFORGE_CPU_ISA", isas[-1])
    assert same(in_steps(args, [200, 400], plugins.attention_mass), run(args))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(value, isas, monkeypatch):
    """They spoil the statistics of the KV head for which there are no weights, and of the slots that are seen."""
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        for kind in KINDS:
            args = uniform(3, 9, kind, 0, float("nan"))
            args["q"][1, 0, 3] = value
            for got in run(args):
                slots = got.flip(0).flatten(0, 1)[:9]
                assert slots[:, 1].isfinite().all() and slots[8].isfinite().all()
                assert slots[:8, 0].isfinite().all() if kind == BELOW else slots[:8, 0].isnan().all()


def test_huge_logits_give_all_to_their_slots(isas, monkeypatch):
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        for size in (1e9, 1e18):
            args = uniform(1, 9, SUM, 0, 0.0)
            args["k_pool"] = -torch.ones_like(args["k_pool"])
            args["k_pool"][1, 1] = 1.0  # slot 5
            args["q"] = torch.full((1, 4, 8), size)
            assert run(args)[0].flip(0).flatten(0, 1)[:9, 0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_strided_arguments_are_taken():
    for seed in range(8):
        args = by_name(seed, kind=SUM_AND_SQUARES)
        views = {
            name: torch.stack((x, x), dim=-1)[..., 0] if isinstance(x, torch.Tensor) and name != "k_pool" else x
            for name, x in args.items()
        }
        views |= {name: torch.stack((args[name],) * 2, dim=1)[:, 0] for name in ("mass", "squares", "k_pool")}
        want = run(args)
        plugins.attention_mass(**views)
        assert same([views["mass"].contiguous(), views["squares"].contiguous()], want)


def arguments() -> dict:
    return uniform(3, 8, SUM_AND_SQUARES, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.randn(3, 32)),
        ("q", torch.randn(3, 4, 8).half()),
        ("q", torch.randn(3, 4, 6)),
        ("q", torch.randn(3, 3, 8)),
        ("q", torch.randn(3, 0, 8)),
        ("k_pool", torch.zeros(2, 4, 2, 8).half()),
        ("k_pool", torch.zeros(2, 4, 16)),
        ("k_pool", torch.zeros(2, 4, 8, 2).transpose(2, 3)),
        ("k_pool", torch.zeros(2, 0, 2, 8)),
        ("query_start", ints(0, 4)),
        ("query_start", torch.tensor([0, 3])),
        ("kv_length", ints(2)),
        ("kv_length", ints(-1)),
        ("kv_length", ints(8, 8)),
        ("page_table", ints([0, 2])),
        ("page_table", ints([0, -1])),
        ("page_table", ints([0])),
        ("page_table", ints([0, 1]).long()),
        ("state_table", ints([0, 2])),
        ("state_table", ints([0, -1])),
        ("state_table", ints([0])),
        ("state_table", torch.zeros(1, 0, dtype=torch.int32)),
        ("state_table", ints([0, 1], [1, 0])),
        ("skipped", ints(-1)),
        ("skipped", ints(0, 0)),
        ("scored", ints(-1)),
        ("scored", ints(0).float()),
        ("scale", float("nan")),
        ("kind", -1),
        ("kind", 4),
        ("mass", torch.zeros(2, 4, 3)),
        ("mass", torch.zeros(2, 5, 2)),
        ("mass", torch.zeros(2, 4, 2).bfloat16()),
        ("squares", None),
        ("squares", torch.zeros(3, 4, 2)),
        ("squares", torch.zeros(2, 4, 2).double()),
        ("k_scales", torch.ones(2, 4, 2)),
        ("k_scale", 2.0),
    ],
)
def test_refuses_wrong_arguments_by_name_before_writing(name, value):
    good = arguments()
    plugins.attention_mass(**good)
    assert good["mass"].any() and good["squares"].any()
    good = arguments()
    with pytest.raises(RuntimeError, match=rf"attention_mass: {name} "):
        plugins.attention_mass(**(good | {name: value}))
    assert not good["mass"].any() and not good["squares"].any()


def test_refuses_squares_that_no_kind_asks_for():
    for kind in (SUM, BELOW, LARGEST_WEIGHT):
        with pytest.raises(RuntimeError, match="attention_mass: squares go with kind 1"):
            plugins.attention_mass(**(arguments() | {"kind": kind}))


def test_refuses_wrong_scales_by_name():
    pool = {"k_pool": torch.zeros(2, 4, 2, 8, dtype=torch.int8)}
    for wrong in ({"k_scales": torch.ones(2, 4)}, {"k_scales": torch.ones(2, 4, 2).double()}, {"k_scale": 0.0}):
        with pytest.raises(RuntimeError, match=f"attention_mass: {next(iter(wrong))} "):
            plugins.attention_mass(**(arguments() | pool | wrong))


def test_opcheck():
    op = torch.ops.kvforge.attention_mass.default
    for seed in range(12):
        case = random_case(seed, small=True)
        if len(case[0]) and len(case[3]):  # opcheck cannot clone an empty argument
            # test_schema compares copies of arguments by arithmetic that torch does not have for e4m3.
            checks = [check for check in ALL_TEST_UTILS if case[1].dtype not in LARGEST or check != "test_schema"]
            torch.library.opcheck(op, case, test_utils=checks)
