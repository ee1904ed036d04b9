"""SealPages on CPU against its definition, and what it refuses."""

import pytest
import torch

import plugins
from plugins.seal_pages.cases import random_case
from tests.support.operators.backends import run_cpu
from tests.support.operators.cases import difference, fresh, reference


def test_the_kernel_is_its_definition() -> None:
    plugins.load_library()
    for seed in range(25):
        args = random_case(seed, small=True)
        wrong = difference("seal_pages", args, run_cpu("seal_pages", args), reference("seal_pages", args))
        assert wrong is None, (seed, wrong)


def test_pages_outside_the_pools_are_refused_before_any_write() -> None:
    plugins.load_library()
    args = list(fresh("seal_pages", random_case(1)))
    args[2] = torch.tensor([[0, 0], [0, 99]], dtype=torch.int32)
    before = [x.clone() for x in args[3:]]
    with pytest.raises(RuntimeError, match="seal_pages: seal names page 99 of"):
        torch.ops.kvforge.seal_pages(*args)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(args[3:], before, strict=True))


def test_not_finite_numbers_have_groups_that_are_not() -> None:
    """Those of their groups alone: a NaN, infinities, and numbers beyond float16's largest."""
    args = list(fresh("seal_pages", random_case(4)))
    exact_k, exact_v = args[:2]
    generator = torch.Generator().manual_seed(0)
    for x in (exact_k, exact_v):
        for value in (float("nan"), float("inf"), float("-inf"), 1e6, -1e6):
            x.view(-1)[torch.randint(x.numel(), (2,), generator=generator)] = value
    args[2] = torch.tensor([[0, 1]], dtype=torch.int32)
    got, want = run_cpu("seal_pages", tuple(args)), reference("seal_pages", tuple(args))
    assert difference("seal_pages", tuple(args), got, want) is None
    for groups in got[2:]:
        num_bad = int((~groups[1].isfinite()).sum())
        assert 0 < num_bad <= 2 * 10
