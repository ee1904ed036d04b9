"""SealPages and GroupedAttention on CPU against their definitions, and what they refuse."""

import pytest
import torch

import plugins
from plugins.grouped_attention.cases import random_case as attention_case
from plugins.seal_pages.cases import random_case as seal_case
from tests.support.operators.backends import run_cpu
from tests.support.operators.cases import difference, fresh, reference


@pytest.mark.parametrize("name, make", [("seal_pages", seal_case), ("grouped_attention", attention_case)])
def test_kernels_are_their_definitions(name, make) -> None:
    plugins.load_library()
    for seed in range(25):
        args = make(seed, small=True)
        wrong = difference(name, args, run_cpu(name, args), reference(name, args))
        assert wrong is None, (seed, wrong)


def test_pages_outside_the_pools_are_refused_before_any_write() -> None:
    plugins.load_library()
    args = list(fresh("seal_pages", seal_case(1)))
    args[2] = torch.tensor([[0, 0], [0, 99]], dtype=torch.int32)
    before = [x.clone() for x in args[3:]]
    with pytest.raises(RuntimeError, match="seal_pages: seal names page 99 of"):
        torch.ops.kvforge.seal_pages(*args)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(args[3:], before, strict=True))
