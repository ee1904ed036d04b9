"""LandmarkSelect on CPU: ties, outliers, every head layout, its invariances, bad numbers, and what it refuses."""

import pytest
import torch

import plugins
from plugins.landmark_select.cases import random_case as landmark_select_case
from tests.support.operators.cases import difference

REFERENCE = plugins.OPERATORS["landmark_select"].reference


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def one_sequence(landmarks: torch.Tensor, q: torch.Tensor, selected: int, outliers: tuple[int, ...] = ()) -> tuple:
    """Arguments for chunks [m, kv_heads, head_dim] in pages of one, in reverse order."""
    chunks = len(landmarks)
    is_outlier = torch.zeros(chunks, 1, landmarks.shape[1], dtype=torch.uint8)
    is_outlier[list(outliers)] = 1
    table = torch.arange(chunks - 1, -1, -1).int()[None]
    step = (ints(0, 1), table, ints(chunks), ints(selected))
    return q[None], landmarks.flip(0)[:, None], is_outlier.flip(0), *step, 1.0, max(selected, 1)


def test_equal_scores_go_to_the_lower_chunk(isas, monkeypatch):
    values = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, 3.0] * 9)
    landmarks = torch.zeros(len(values), 1, 64)
    landmarks[:, 0, 0] = values
    q = torch.zeros(1, 64).index_fill(1, torch.tensor(0), 1.0)
    order = values.argsort(descending=True, stable=True)
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        for dtype in (torch.float32, torch.bfloat16):
            for selected in range(len(values) + 1):
                args = one_sequence(landmarks.to(dtype), q.to(dtype), selected)
                got = plugins.landmark_select(*args)[0, 0]
                assert got[:selected].tolist() == sorted(order[:selected].tolist()), (isa, selected)


def test_a_group_selects_by_its_most_attentive_head():
    """Softmax is per query head: a head with small logits still gets the chunk that it attends to most."""
    landmarks = torch.zeros(20, 1, 64)
    landmarks[3, 0, 0], landmarks[7, 0, 1], landmarks[8, 0, 1] = 30.0, 8.0, 7.0
    q = torch.zeros(2, 64)
    q[0, 0] = q[1, 1] = 1.0
    assert plugins.landmark_select(*one_sequence(landmarks, q, 2)).tolist() == [[[3, 7]]]


def test_outliers_are_never_selected(isas, monkeypatch):
    torch.manual_seed(0)
    landmarks, q = torch.randn(90, 2, 64), torch.randn(4, 64)
    outliers = tuple(sorted({*range(90)} - {5, 33, 89}))
    landmarks[list(outliers)] = float("nan")
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        assert plugins.landmark_select(*one_sequence(landmarks, q, 3, outliers)).tolist() == [[[5, 33, 89]] * 2]
        more = plugins.landmark_select(*one_sequence(landmarks, q, 5, outliers))
        assert more.tolist() == [[[5, 33, 89, -1, -1]] * 2]
        none = plugins.landmark_select(*one_sequence(landmarks, q, 4, tuple(range(90))))
        assert none.tolist() == [[[-1] * 4] * 2]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_group(head_dim, isas, monkeypatch):
    torch.manual_seed(head_dim)
    for kv_heads, group in ((1, 1), (8, 1), (1, 32), *((2, group) for group in range(2, 9))):
        for dtype in (torch.float32, torch.bfloat16):
            landmarks, q = torch.randn(70, kv_heads, head_dim).to(dtype), torch.randn(kv_heads * group, head_dim)
            args = one_sequence(landmarks, q.to(dtype) * head_dim**-0.5, 16, (3, 69))
            want = REFERENCE(*args)
            for isa in isas:
                monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                wrong = difference("landmark_select", args, [plugins.landmark_select(*args)], [want])
                assert wrong is None, (wrong, kv_heads, group, dtype, isa)


def test_nothing_to_do():
    args = one_sequence(torch.randn(4, 1, 64), torch.randn(1, 64), 2)
    for starts, chunks, selected in ((0, 4, 2), (1, 0, 2), (1, 4, 0)):
        q = args[0][:starts]
        got = plugins.landmark_select(q, *args[1:3], ints(0, starts), args[4], ints(chunks), ints(selected), 1.0, 2)
        assert got.tolist() == [[[-1, -1]]]
    empty = (args[0][:0], *args[1:3], ints(0), args[4][:0], ints(), ints(), 1.0, 2)
    assert plugins.landmark_select(*empty).shape == (0, 1, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_queries_that_are_not_finite_select_chunks(value, isas, monkeypatch):
    for q in (torch.full((2, 64), value), torch.randn(2, 64).index_fill(1, torch.tensor(9), value)):
        args = one_sequence(torch.randn(50, 1, 64), q, 7, (0, 1))
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            got = plugins.landmark_select(*args)[0, 0]
            assert got.min() >= 2 and got.max() < 50 and (got.diff() > 0).all()
    if value != value:  # no score is a number: the first chunks
        assert got.tolist() == [*range(2, 9)]


def test_a_sequence_does_not_depend_on_its_neighbours_pages_or_threads():
    threads = torch.get_num_threads()
    try:
        for seed in range(40):
            q, landmarks, is_outlier, starts, table, chunks, selected, *rest = args = landmark_select_case(seed)
            torch.set_num_threads(3)
            together = plugins.landmark_select(*args)
            torch.set_num_threads(1)
            order = torch.randperm(len(landmarks))
            for s in range(len(chunks)):
                one = slice(s, s + 1)
                used = -(-int(chunks[s]) // landmarks.shape[1])
                moved = table[one].clone()
                moved[0, :used] = order.argsort()[table[s, :used].long()].int()
                alone = plugins.landmark_select(
                    q[int(starts[s]) : int(starts[s + 1])], landmarks[order], is_outlier[order],
                    ints(0, int(starts[s + 1] - starts[s])), moved, chunks[one], selected[one], *rest,
                )  # fmt: skip
                assert torch.equal(alone[0], together[s]), (seed, s)
    finally:
        torch.set_num_threads(threads)


def test_strided_arguments_are_taken():
    case = next(c for seed in range(100) if (c := landmark_select_case(seed))[6].sum() > 5)
    want = plugins.landmark_select(*case)
    views = [torch.stack((x, x), dim=-1)[..., 0] if i in (0, 1, 2, 4) else x for i, x in enumerate(case)]
    assert torch.equal(plugins.landmark_select(*views), want) and (want >= 0).any()


def arguments() -> dict:
    return {
        "q": torch.randn(3, 4, 8),
        "landmarks": torch.randn(6, 2, 2, 8),
        "is_outlier": torch.zeros(6, 2, 2, dtype=torch.uint8),
        "query_start": ints(0, 1, 3),
        "table": ints([0, 5], [1, -1]),
        "num_chunks": ints(4, 2),
        "num_selected": ints(3, 0),
        "scale": 0.5,
        "max_selected": 3,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.randn(3, 4, 8, 1)),
        ("q", torch.randn(3, 4, 8).half()),
        ("landmarks", torch.randn(6, 2, 2, 8).bfloat16()),
        ("landmarks", torch.randn(6, 2, 2, 7)),
        ("landmarks", torch.randn(6, 2, 3, 8)),
        ("landmarks", torch.randn(6, 0, 2, 8)),
        ("is_outlier", torch.zeros(6, 2, 2)),
        ("is_outlier", torch.zeros(6, 2, 1, dtype=torch.uint8)),
        ("query_start", ints(0, 1, 4)),
        ("query_start", ints(0, 4, 3)),
        ("query_start", torch.tensor([0, 1, 3])),
        ("table", ints([0, 6], [1, -1])),
        ("table", ints([0, -1], [1, -1])),
        ("table", ints([0, 5])),
        ("table", torch.tensor([[0, 5], [1, -1]])),
        ("num_chunks", ints(5, 2)),
        ("num_chunks", ints(-1, 2)),
        ("num_chunks", ints(4)),
        ("num_selected", ints(4, 0)),
        ("num_selected", ints(3, -1)),
        ("num_selected", ints(3, 0).float()),
        ("max_selected", -1),
    ],
)
def test_refuses_wrong_arguments_by_name(name, value):
    assert plugins.landmark_select(**arguments()).shape == (2, 2, 3)
    with pytest.raises(RuntimeError, match=rf"landmark_select: {name} "):
        plugins.landmark_select(**(arguments() | {name: value}))


def test_opcheck():
    args = tuple(arguments().values())
    torch.library.opcheck(torch.ops.kvforge.landmark_select.default, args)
