"""LatentKvWrite on CPU: threads, numbers that are none, and what it refuses."""

import pytest
import torch

import plugins
from plugins.agreement import values_differ
from plugins.cases import FLOAT
from plugins.latent_kv_write.cases import random_case


def arguments(tokens: int = 4, dtype: torch.dtype = torch.float32) -> list:
    pool = torch.zeros(2, 8, 1, 20, dtype=dtype)
    scales = torch.zeros(2, 8, 1) if pool.element_size() == 1 else None
    angles = torch.rand(tokens, 3)
    return [torch.randn(tokens, 1, 20), angles.cos(), angles.sin(), torch.arange(tokens).int(), pool, scales]


def test_what_does_not_rotate_stays_and_the_rest_turns():
    k, cos, sin, slots, pool, _ = args = arguments()
    plugins.latent_kv_write(*args)
    written = pool[0, :4, 0]
    assert torch.equal(written[:, :14], k[:, 0, :14])
    turn = torch.complex(cos, sin) * torch.complex(k[:, 0, 14:17], k[:, 0, 17:])
    assert values_differ(written[:, 14:], torch.cat((turn.real, turn.imag), -1), terms=2) is None
    assert not pool[1].any() and slots.dtype == torch.int32


def test_a_number_that_is_none_stays_in_its_row():
    args = arguments(dtype=torch.int8)
    args[0][1, 0, 5] = float("nan")
    plugins.latent_kv_write(*args)
    scales = args[5][0, :4, 0]
    assert scales[1].isnan() and scales[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("index", "value", "name"),
    [
        (0, torch.randn(4, 2, 20), "k"),
        (0, torch.randn(4, 1, 18), "k"),
        (1, torch.ones(4, 11), "cos"),
        (1, torch.ones(4, 2), "sin"),
        (3, torch.tensor([0, 1, 2, 16]).int(), "slot_mapping"),
        (3, torch.arange(4), "slot_mapping"),
        (4, torch.zeros(2, 8, 2, 20), "k_pool"),
        (4, torch.zeros(2, 8, 1, 20).to(torch.int8), "k_scales"),
        (5, torch.zeros(2, 8, 1), "k_scales"),
    ],
)
def test_refuses_wrong_arguments_by_name(index, value, name):
    args = arguments()
    args[index] = value
    before = args[4].clone()
    with pytest.raises(RuntimeError, match=rf"latent_kv_write: {name} "):
        plugins.latent_kv_write(*args)
    assert torch.equal(args[4], before)


def test_opcheck():
    op = torch.ops.kvforge.latent_kv_write.default
    for args in [random_case(seed, small=True, formats=(FLOAT,)) for seed in range(6)]:
        torch.library.opcheck(op, args)
