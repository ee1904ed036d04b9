"""RopePagedKvWrite on CPU against its reference, and what it refuses."""

import pytest
import torch
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

import plugins
from plugins.cases import ALL_FORMATS, MIXED_FORMATS
from plugins.errors import PluginError
from plugins.kv_quantization import INT4, LARGEST, quantize, stored_dim
from plugins.registration import functional_writes
from plugins.rope_paged_kv_write.cases import random_case as rope_paged_kv_write_case

REFERENCE = plugins.OPERATORS["rope_paged_kv_write"].reference
EIGHT_BIT = (torch.float8_e4m3fn, torch.int8)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def copies(args: tuple) -> tuple:
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)


def test_returns_what_it_was_given(isas, monkeypatch):
    for seed in range(10):
        *tensors, k_scale, v_scale, rotates = copies(rope_paged_kv_write_case(seed, mixed=True))
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        result = plugins.rope_paged_kv_write(*tensors, **scales, rotates_keys=rotates)
        written = [x for x in tensors[5:] if x is not None]
        assert all(got is given for got, given in zip(result, written, strict=True))


def test_writes_views_of_one_allocation_and_nothing_else():
    *inputs, k_pool, v_pool, _, _, _, _ = rope_paged_kv_write_case(6)
    assert k_pool.dtype.is_floating_point and k_pool.dtype.itemsize > 1
    both = torch.full((k_pool.shape[0], 2, *k_pool.shape[1:]), 7.0)
    plugins.rope_paged_kv_write(*inputs, both[:, 0], both[:, 1])
    k_pool, v_pool = (torch.full(k_pool.shape, 7.0) for _ in range(2))
    REFERENCE(*inputs, k_pool, v_pool)
    assert torch.equal(both, torch.stack((k_pool, v_pool), dim=1))


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_every_value_and_boundary_between_values(dtype, isas, monkeypatch):
    """Each stored number, the middle between neighbours, and one float on either side of it, without rotation."""
    if dtype == torch.int8:
        stored = torch.arange(-127, 128).float()
    else:
        stored = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        stored = stored[stored.isfinite()].sort().values
    middle = (stored[1:] + stored[:-1]) / 2
    infinity = torch.tensor(float("inf"))
    values = [stored, middle, middle.nextafter(infinity), middle.nextafter(-infinity), 2 * stored, stored * 1e30]
    x = torch.cat([*values, torch.tensor([0.0, -0.0, 1e-45, torch.inf, -torch.inf, torch.nan])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 8)).view(-1, 1, 8)
    cos, sin, slots = torch.ones(len(x), 4), torch.zeros(len(x), 4), torch.arange(len(x)).int()
    for scale in (1.0, 0.37):
        want = quantize(x * scale, scale, dtype)
        for isa in isas:
            monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
            pools = [torch.zeros(len(x), 1, 1, 8).to(dtype) for _ in range(2)]
            plugins.rope_paged_kv_write(x, x * scale, cos, sin, slots, *pools, v_scale=scale)
            got = pools[1][:, 0]
            same = (bits(got) == bits(want)) | (got.float().isnan() & want.float().isnan())
            assert same.all(), (isa, scale, x[~same])


def test_int4_rounds_half_to_even_and_saturates():
    """The format by itself; that the kernels have its bits, rotated, is seen on the random cases."""
    values = [7.0, -7.0, 0.5, 1.5, -0.5, -1.5, 7.5, -9.0, 3.4999, 2.5001, float("nan"), 0.0]
    codes = [7, -7, 0, 2, 0, -2, 7, -7, 3, 3, 0, 0]
    stored = quantize(torch.tensor(values) * 0.37, 0.37, INT4)
    assert [(int(byte) & 15, int(byte) >> 4) for byte in stored] == [
        (low & 15, high & 15) for low, high in zip(codes[::2], codes[1::2], strict=True)
    ]


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_a_scale_that_is_not_finite(dtype, value, isas, monkeypatch):
    good = arguments()
    good["v"][1, 1, 5] = value
    good["k"][1, 0, 2] = value
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        pools = [torch.zeros(2, 4, 2, stored_dim(8, dtype)).to(dtype) for _ in range(2)]
        scales = [torch.zeros(2, 4, 2) for _ in range(2)]
        keys = {"k_pool": pools[0], "v_pool": pools[1], "k_scales": scales[0], "v_scales": scales[1]}
        plugins.rope_paged_kv_write(**(good | keys))
        for scale, head in ((scales[0], 0), (scales[1], 1)):
            assert not scale[1, 1, head].isfinite() and scale[1, 1, 1 - head].isfinite()
            assert scale[0].isfinite().all()


def arguments() -> dict[str, torch.Tensor]:
    return {
        "k": torch.randn(3, 2, 8),
        "v": torch.randn(3, 2, 8),
        "cos": torch.randn(3, 4),
        "sin": torch.randn(3, 4),
        "slot_mapping": torch.tensor([0, 5, -1], dtype=torch.int32),
        "k_pool": torch.zeros(2, 4, 2, 8),
        "v_pool": torch.zeros(2, 4, 2, 8),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", torch.randn(3, 2, 6)),
        ("k", torch.randn(3, 16)),
        ("k", torch.randn(3, 2, 8).double()),
        ("v", torch.randn(2, 2, 8)),
        ("v", torch.randn(3, 2, 8).bfloat16()),
        ("cos", torch.randn(3, 8)),
        ("sin", torch.randn(3, 4).bfloat16()),
        ("slot_mapping", torch.zeros(3, dtype=torch.int64)),
        ("slot_mapping", torch.zeros(4, dtype=torch.int32)),
        ("slot_mapping", torch.tensor([0, 8, 1], dtype=torch.int32)),
        ("slot_mapping", torch.tensor([0, 2**31 - 1, 1], dtype=torch.int32)),
        ("k_pool", torch.zeros(2, 4, 2, 8).half()),
        ("k_pool", torch.zeros(2, 4, 2, 8).to(torch.float8_e5m2)),
        ("k_pool", torch.zeros(2, 4, 2, 8).to(torch.int16)),
        ("k_pool", torch.zeros(8, 2, 8)),
        ("k_scale", 2.0),
        ("v_scale", 0.5),
        ("v_pool", torch.zeros(2, 5, 2, 8)),
        ("v_pool", torch.zeros(2, 4, 2, 8).bfloat16()),
        ("v_pool", torch.zeros(2, 4, 8, 2).transpose(2, 3)),
        ("v_pool", torch.zeros(2, 4, 2, 4, dtype=torch.uint8)),
    ],
)
def test_refuses_wrong_arguments_by_name_before_writing(name, value):
    good = arguments()
    wrong = good | {name: value}
    with pytest.raises(RuntimeError, match=rf"rope_paged_kv_write: {name} "):
        plugins.rope_paged_kv_write(**wrong)
    assert not good["k_pool"].any() and not good["v_pool"].any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k_scales", None),
        ("v_scales", None),
        ("k_scales", torch.zeros(2, 4)),
        ("k_scales", torch.zeros(2, 4, 3)),
        ("k_scales", torch.zeros(2, 4, 2).bfloat16()),
        ("v_scales", torch.zeros(2, 5, 2)),
        ("v_scales", torch.zeros(2, 4, 2).double()),
        ("k_scale", 0.5),
        ("v_scale", 2.0),
        ("slot_mapping", torch.tensor([0, 8, 1], dtype=torch.int32)),
    ],
)
def test_refuses_wrong_scales_by_name_before_writing(name, value):
    pools = {key: torch.zeros(2, 4, 2, 8, dtype=torch.int8) for key in ("k_pool", "v_pool")}
    scales = {key: torch.zeros(2, 4, 2) for key in ("k_scales", "v_scales")}
    with pytest.raises(RuntimeError, match=rf"rope_paged_kv_write: {name} "):
        plugins.rope_paged_kv_write(**(arguments() | pools | scales | {name: value}))
    assert not any(x.any() for x in (*pools.values(), *scales.values()))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e60])
def test_refuses_a_static_scale_that_is_no_positive_float32(value):
    pools = {key: torch.zeros(2, 4, 2, 8, dtype=torch.int8) for key in ("k_pool", "v_pool")}
    with pytest.raises(RuntimeError, match="rope_paged_kv_write: v_scale must be a positive float32"):
        plugins.rope_paged_kv_write(**(arguments() | pools | {"v_scale": value}))


def test_refuses_scales_of_float_pools():
    scales = {key: torch.zeros(2, 4, 2) for key in ("k_scales", "v_scales")}
    with pytest.raises(RuntimeError, match="rope_paged_kv_write: k_scales are for 8-bit pools"):
        plugins.rope_paged_kv_write(**(arguments() | scales))


@pytest.mark.parametrize("pool", [torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8, dtype=torch.int8)])
def test_refuses_rotated_keys_but_in_int8_with_scales(pool):
    with pytest.raises(RuntimeError, match="rope_paged_kv_write: rotates_keys is for a k_pool of int8 with k_scales"):
        plugins.rope_paged_kv_write(**(arguments() | {"k_pool": pool, "v_pool": pool}), rotates_keys=True)
    with functional_writes(), pytest.raises(PluginError, match="rotates keys on CPUs alone"):
        plugins.rope_paged_kv_write(**(arguments() | {"k_pool": pool, "v_pool": pool}), rotates_keys=True)


def test_refuses_an_odd_head_dim():
    pool = torch.zeros(2, 4, 2, 7)
    k = torch.randn(3, 2, 7)
    with pytest.raises(RuntimeError, match="k_pool must have an even head_dim"):
        plugins.rope_paged_kv_write(**(arguments() | {"k": k, "v": k, "k_pool": pool, "v_pool": pool}))


def test_opcheck():
    op = torch.ops.kvforge.rope_paged_kv_write.default
    for cache in (*ALL_FORMATS, *MIXED_FORMATS):
        cases = (rope_paged_kv_write_case(seed, formats=(cache,)) for seed in range(40))
        case = next(case for case in cases if len(case[0]))  # opcheck cannot clone an empty argument
        # test_schema compares copies of arguments by arithmetic that torch does not have for e4m3.
        checks = [check for check in ALL_TEST_UTILS if case[5].dtype != torch.float8_e4m3fn or check != "test_schema"]
        torch.library.opcheck(op, case, test_utils=checks)
