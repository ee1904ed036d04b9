"""PackedLinear on CPU: packing, bits that must not depend on the rest of a batch, and what it refuses."""

import pytest
import torch

import plugins
from plugins.packed_linear import pack
from plugins.packed_linear.cases import random_case as packed_linear_case
from plugins.packed_linear.packing import IN_STEPS, INT4, unpack

REFERENCE = plugins.OPERATORS["packed_linear"].reference
DTYPES = (torch.bfloat16, torch.int8, *INT4)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "depth"), [(2, 1), (64, 2), (66, 7), (320, 32), (1200, 9)])
def test_packing_keeps_every_weight(outputs, depth, gated):
    weight = normal(outputs, depth)
    packed, scales = pack(weight, torch.bfloat16, gated)
    assert scales is None and packed.shape[1:] == ((depth + 1) // 2, 64, 2) and packed.is_contiguous()
    assert torch.equal(unpack(packed, outputs, depth, gated), weight)
    assert packed.count_nonzero() == weight.count_nonzero()  # the rest is zero

    packed, scales = pack(weight, torch.int8, gated)
    assert packed.shape[1:] == ((depth + 3) // 4, 64, 4) and packed.is_contiguous()
    scale, total = (unpack(x.view(-1, 1, 64, 1), outputs, 1, gated) for x in scales)
    rows = unpack(packed, outputs, depth, gated)
    assert torch.equal(rows.sum(1, keepdim=True).float(), total)
    assert (rows.float() * scale - weight.float()).abs().max() <= scale.max() * 0.5001
    assert torch.equal(rows.abs().amax(1), torch.full((outputs,), 127, dtype=torch.int8))


@pytest.mark.parametrize(
    ("weight", "dtype", "gated", "message"),
    [
        (
            torch.zeros(4, 4),
            torch.float32,
            False,
            "torch.int4, torch.uint4, torch.quint4x2, not torch.float32",
        ),
        (torch.zeros(4), torch.int8, False, r"matrix \[N, K\], not of shape \[4\]"),
        (torch.zeros(4, 0), torch.int8, False, r"matrix \[N, K\], not of shape \[4, 0\]"),
        (torch.zeros(5, 4), torch.int8, True, "so 5 cannot be packed"),
        (torch.zeros(5, 4), IN_STEPS, True, "so 5 cannot be packed"),
    ],
)
def test_packing_refuses(weight, dtype, gated, message):
    with pytest.raises(ValueError, match=message):
        pack(weight, dtype, gated)


def test_a_layer_as_the_models_write_it():
    """Against torch's modules, not our reference: norm, linear layer and residual; norm and gated layer."""
    torch.manual_seed(0)
    x, norm = normal(9, 96), 1 + 0.1 * normal(96, seed=1)
    wide = torch.nn.functional.rms_norm(x.float(), (96,), norm.float(), 1e-5)
    weight, bias, residual = normal(80, 96, seed=2) / 10, normal(80, seed=3), normal(9, 80, seed=4)
    want = residual.float() + torch.nn.functional.linear(wide, weight.float(), bias.float())
    gate, up = (wide @ weight.float().T).chunk(2, dim=-1)
    for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.int8, 0.03), (IN_STEPS, 0.2)):
        packed, scales = pack(weight, dtype)
        got = plugins.packed_linear(x, packed, 80, scales=scales, bias=bias, norm=norm, eps=1e-5, residual=residual)
        assert got.dtype == torch.bfloat16 and (got - want).abs().max() < tolerance * want.abs().max()
        packed, scales = pack(weight, dtype, gated=True)
        got = plugins.packed_linear(x, packed, 40, scales=scales, norm=norm, eps=1e-5, gated=True, float32_out=True)
        want_gated = torch.nn.functional.silu(gate) * up
        assert got.dtype == torch.float32 and (got - want_gated).abs().max() < tolerance * want_gated.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others_or_on_threads(dtype, isas, monkeypatch):
    """Large enough for several blocks of rows and of the depth, and more panels than threads."""
    threads = torch.get_num_threads()
    rows, depth, outputs = 401, 2310, 150
    x, norm, residual = normal(rows, depth), normal(depth, seed=1), normal(rows, outputs, seed=2)
    for isa, gated in [(isa, gated) for isa in isas for gated in (False, True)]:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        packed, scales = pack(normal(outputs * (1 + gated), depth, seed=3) / 48, dtype, gated)

        def run(part: slice, gated=gated, packed=packed, scales=scales, exact=True) -> torch.Tensor:
            options = {"scales": scales, "norm": norm, "residual": residual[part], "gated": gated}
            return plugins.packed_linear(x[part], packed, outputs, **options, float32_out=exact)

        whole, rounded = run(slice(rows)), run(slice(rows), exact=False)
        for size in (1, 16, 17):
            assert torch.equal(run(slice(size), exact=False), rounded[:size]), (isa, gated, size)
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                if count != threads and isa != "portable":
                    assert torch.equal(run(slice(rows)), whole), (isa, gated, count)
                for size in (1, 2, 3, 7, 8, 13, 16, 17, 33, 193):
                    begin = 37 * size % (rows - size)
                    part = slice(begin, begin + size)
                    assert torch.equal(run(part), whole[part]), (isa, gated, count, size)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite_rows_stay_so_and_leave_the_others_alone(dtype, isas, monkeypatch):
    packed, scales = pack(normal(70, 40), dtype)
    x = normal(9, 40, seed=1)
    bad = x.clone()
    bad[2, 7], bad[5, 3] = float("nan"), float("inf")
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        want, got = (plugins.packed_linear(y, packed, 70, scales=scales) for y in (x, bad))
        others = [0, 1, 3, 4, 6, 7, 8]
        assert torch.equal(got[others], want[others]), isa
        assert got[2].isnan().all() and not got[5].isfinite().any(), isa


def arguments() -> dict:
    packed, scales = pack(normal(70, 10), torch.int8)
    return {
        "x": normal(3, 10),
        "weight": packed,
        "scales": scales,
        "bias": normal(70),
        "norm": normal(10),
        "residual": normal(3, 70),
        "out_features": 70,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", torch.randn(3, 10)),
        ("x", normal(3, 10, 1)),
        ("x", normal(10, 3).T),
        ("x", normal(3, 0)),
        ("weight", arguments()["weight"].float()),
        ("weight", arguments()["weight"].bfloat16()),
        ("weight", arguments()["weight"][:1]),
        ("weight", pack(normal(70, 13), torch.int8)[0]),
        ("weight", arguments()["weight"].transpose(0, 1).contiguous().transpose(0, 1)),
        ("scales", None),
        ("scales", torch.randn(2, 70)),
        ("scales", normal(2, 128)),
        ("bias", normal(71)),
        ("bias", torch.randn(70)),
        ("norm", normal(1, 10)),
        ("norm", torch.randn(10)),
        ("residual", normal(2, 70)),
        ("residual", normal(3, 64)),
        ("residual", torch.randn(3, 70)),
        ("residual", normal(70, 3).T),
        ("out_features", 0),
        ("out_features", -5),
    ],
)
def test_refuses_wrong_arguments_by_name(name, value):
    assert plugins.packed_linear(**arguments()).shape == (3, 70)
    with pytest.raises(RuntimeError, match=rf"packed_linear: {name} "):
        plugins.packed_linear(**(arguments() | {name: value}))


def test_refuses_scales_with_bfloat16_weights():
    values = arguments() | {"weight": pack(normal(70, 10), torch.bfloat16)[0]}
    with pytest.raises(RuntimeError, match="packed_linear: scales must be given with int8 and int4 weights, and only"):
        plugins.packed_linear(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", pack(normal(70, 33), IN_STEPS)[0]),
        ("weight", pack(normal(70, 10), IN_STEPS)[0][..., :-1]),
        ("weight", pack(normal(70, 10), IN_STEPS)[0][:, 0]),
        ("scales", None),
        ("scales", pack(normal(70, 10), torch.int8)[1]),
    ],
)
def test_refuses_what_does_not_fit_int4(name, value):
    weight, scales = pack(normal(70, 10), IN_STEPS)
    values = arguments() | {"weight": weight, "scales": scales}
    assert plugins.packed_linear(**values).shape == (3, 70)
    with pytest.raises(RuntimeError, match=rf"packed_linear: {name} "):
        plugins.packed_linear(**(values | {name: value}))


def test_opcheck():
    op = torch.ops.kvforge.packed_linear.default
    for args in [packed_linear_case(seed, small=True) for seed in range(8)]:
        torch.library.opcheck(op, args)
