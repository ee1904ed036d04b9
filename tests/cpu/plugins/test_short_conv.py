"""ShortConv on CPU: bits that depend on a sequence's own tokens alone, and what it refuses."""

import pytest
import torch
from torch.nn import functional as F

import plugins
from plugins.agreement import values_differ
from plugins.short_conv.cases import random_case


def arguments(tokens: int = 6) -> list:
    starts, read, write = [0, 2, tokens], [1, -1], [-1, 1, *[-1] * (tokens - 3), 2]
    rows = [torch.tensor(each).int() for each in (starts, read, write)]
    return [torch.randn(tokens, 20), torch.randn(4, 20), *rows, torch.randn(3, 3, 20), True, None]


def test_it_is_a_depthwise_convolution():
    x, weight = torch.randn(30, 20), torch.randn(4, 20)
    starts, none = torch.tensor([0, 30]).int(), torch.tensor([-1]).int()
    for bias in (None, torch.randn(20)):
        got = plugins.short_conv(x, weight, starts, none, none.expand(30), torch.zeros(1, 3, 20), bias=bias)
        want = F.silu(F.conv1d(F.pad(x.T[None], (3, 0)), weight.T[:, None], bias, groups=20))[0].T
        assert values_differ(got, want, terms=5) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_steps_and_rows(dtype, isa):
    x, weight = torch.randn(40, 300).to(dtype), torch.randn(4, 300).to(dtype)
    found = []
    for seed, sizes in enumerate(([40], [1] * 40, [2, 17, 1, 20], [3, 37])):
        pool, row, parts = torch.full((5, 3, 300), torch.nan).to(dtype), -1, []
        for index, part in enumerate(x.split(sizes)):
            write, kept = torch.full((len(part),), -1).int(), (index + seed) % 5
            write[-1] = kept
            starts = torch.tensor([0, len(part)]).int()
            parts.append(plugins.short_conv(part, weight, starts, torch.tensor([row]).int(), write, pool))
            row = kept
        found.append((torch.cat(parts), pool[row]))
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))
    assert torch.equal(found[0][1], x[-3:])


@pytest.mark.parametrize(
    ("index", "value", "name"),
    [
        (0, torch.randn(6, 19), "weight"),
        (0, torch.randn(6, 20).bfloat16(), "weight"),
        (1, torch.randn(1, 20), "weight"),
        (2, torch.tensor([0, 7]).int(), "query_start"),
        (3, torch.tensor([0]).int(), "state_read"),
        (3, torch.tensor([3, 0]).int(), "state_read"),
        (4, torch.full((6,), 3).int(), "state_write"),
        (5, torch.randn(3, 2, 20), "conv_pool"),
        (5, torch.randn(3, 3, 20).bfloat16(), "conv_pool"),
        (5, torch.randn(3, 3, 40)[:, :, ::2], "conv_pool"),
        (7, torch.randn(19), "bias"),
        (7, torch.randn(20).bfloat16(), "bias"),
    ],
)
def test_refuses_wrong_arguments_by_name(index, value, name):
    args = arguments()
    args[index] = value
    before = args[5].clone()
    with pytest.raises(RuntimeError, match=rf"short_conv: {name} "):
        plugins.short_conv(*args)
    assert torch.equal(args[5], before)


def test_opcheck():
    for seed in range(6):
        torch.library.opcheck(torch.ops.kvforge.short_conv.default, random_case(seed, small=True))
