"""SelectedKvWrite on CPU: strides, what it leaves alone, and what it refuses."""

import pytest
import torch

import plugins
from plugins.random_cases import selected_kv_write_case
from tests.support.operator_cases import fresh, reference

NAME = "selected_kv_write"


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_strided_pools_keys_and_host_values():
    for seed in range(30):
        args = selected_kv_write_case(seed)
        keys, host_v, rows, targets, k_pool, v_pool = args
        fused = torch.stack((k_pool, v_pool), dim=1)
        host = torch.cat((host_v, host_v), dim=2)[:, :, : host_v.shape[2]]
        ours = (torch.stack((keys, keys), -1)[..., 0], host, rows, targets, fused[:, 0], fused[:, 1])
        got = plugins.selected_kv_write(*ours)
        for one, other in zip(got, reference(NAME, args), strict=True):
            assert torch.equal(one, other), seed


def test_nothing_to_do():
    args = list(selected_kv_write_case(3))
    want = [args[4].clone(), args[5].clone()]
    args[2], args[3] = args[2].fill_(2**31 - 1), args[3].fill_(-1)
    plugins.selected_kv_write(*args)
    assert torch.equal(args[4], want[0]) and torch.equal(args[5], want[1])


def arguments() -> dict[str, torch.Tensor]:
    return {
        "keys": torch.randn(3, 2, 4),
        "host_v": torch.randn(2, 5, 2, 4),
        "rows": ints([0, 9], [-1, 3], [4, 4]),
        "targets": ints([0, 11], [-1, 3], [4, 4]),
        "k_pool": torch.zeros(3, 4, 2, 4),
        "v_pool": torch.zeros(3, 4, 2, 4),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keys", torch.randn(3, 1, 4)),
        ("keys", torch.randn(3, 2, 8)),
        ("keys", torch.randn(3, 2, 4).bfloat16()),
        ("keys", torch.randn(3, 8)),
        ("host_v", torch.randn(2, 5, 1, 4)),
        ("host_v", torch.randn(2, 5, 2, 4).bfloat16()),
        ("host_v", torch.randn(2, 5, 2, 8)[..., ::2]),
        ("rows", ints([0, 10], [-1, 3], [4, 4])),
        ("rows", ints([0, -1], [-1, 3], [4, 4])),
        ("rows", ints([0, 9], [-1, 3])),
        ("rows", arguments()["rows"].long()),
        ("targets", ints([0, 12], [-1, 3], [4, 4])),
        ("targets", ints([0, 2**31 - 1], [-1, 3], [4, 4])),
        ("targets", ints([0, 11, 3])),
        ("k_pool", torch.zeros(3, 4, 2, 4).to(torch.int8)),
        ("v_pool", torch.zeros(3, 4, 2, 5)),
        ("v_pool", torch.zeros(3, 4, 2, 4).bfloat16()),
    ],
)
def test_refuses_wrong_arguments_by_name_before_any_write(name, value):
    assert plugins.selected_kv_write(**arguments())[0].abs().sum() > 0
    wrong = arguments() | {name: value}
    if name == "k_pool":
        wrong["v_pool"] = value.clone()
    with pytest.raises(RuntimeError, match=rf"selected_kv_write: {name} "):
        plugins.selected_kv_write(**wrong)
    assert not wrong["k_pool"].any() and not wrong["v_pool"].any()


def test_opcheck():
    args = fresh(NAME, tuple(arguments().values()))
    torch.library.opcheck(torch.ops.kvforge.selected_kv_write.default, args)
