"""RouteExperts on CPU: ties, numbers that are none, and what it refuses."""

import pytest
import torch

import plugins
from plugins.agreement import values_differ
from plugins.route_experts.cases import random_case


def test_equals_go_to_the_lowest_expert_in_order():
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    ids, weights = plugins.route_experts(logits, 4, True)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert torch.equal(weights[1], torch.full((4,), 0.25))
    ids, weights = plugins.route_experts(logits, 2, False)
    assert values_differ(weights[:1], logits.softmax(-1)[:1, [1, 2]], terms=5) is None


@pytest.mark.parametrize("normalize", [False, True])
def test_not_a_number_stays_in_its_token(normalize):
    logits = torch.randn(40, 6)
    bad = logits.clone()
    bad[3, 4], bad[7, 2] = float("nan"), float("inf")
    want, got = (plugins.route_experts(x, 3, normalize) for x in (logits, bad))
    others = [t for t in range(40) if t not in (3, 7)]
    assert torch.equal(got[0][others], want[0][others]) and torch.equal(got[1][others], want[1][others])
    assert (got[0] >= 0).all() and (got[0] < 6).all()
    assert got[1][3].isnan().all() and got[1][7].isnan().any()


@pytest.mark.parametrize(
    ("logits", "num_active", "name"),
    [
        (torch.randn(3, 4).bfloat16(), 2, "logits"),
        (torch.randn(4), 2, "logits"),
        (torch.randn(3, 4), 0, "num_active"),
        (torch.randn(3, 4), 5, "num_active"),
    ],
)
def test_refuses_wrong_arguments_by_name(logits, num_active, name):
    with pytest.raises(RuntimeError, match=rf"route_experts: {name} "):
        plugins.route_experts(logits, num_active, False)


def test_opcheck():
    op = torch.ops.kvforge.route_experts.default
    for args in [random_case(seed, small=True) for seed in range(6)]:
        torch.library.opcheck(op, args)
