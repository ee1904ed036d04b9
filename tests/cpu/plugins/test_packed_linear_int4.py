"""int4 weights of PackedLinear: how they are rounded and packed, and every bit the reference's on every ISA."""

import itertools
from dataclasses import replace

import pytest
import torch

import plugins
from plugins.packed_linear import pack
from plugins.packed_linear.int4 import Codes, join, round_to_codes
from plugins.packed_linear.int4_steps import SteppedCodes, in_steps, round_in_steps
from plugins.packed_linear.packing import IN_STEPS, INT4, WITH_SCALES, WITH_ZEROS, pack_codes, unpack, unpack_codes

REFERENCE = plugins.OPERATORS["packed_linear"].reference
SCALE_ROUNDING = 2**-11
"""Of a scale that is stored in float16, whose code, a power of two here, is exact."""


ROUNDED_TWICE = 2**-22
"""Of a number that was divided by 15 and multiplied by 15 in float32."""
OF_THE_LARGEST_CODE = 1 / 15
"""The largest weight of a group is off by half a step of its 7 or 8 at most, also where a clipped scale was better."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def random_codes(outputs: int, depth: int, group_depth: int = 32, seed: int = 0) -> Codes:
    """Any codes, scales of either sign and zero points."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, depth), generator=generator).to(torch.uint8)
    shape = (outputs, -(-depth // group_depth))
    zeros = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    return Codes(codes, (torch.randn(shape, generator=generator) / 50).half().float(), zeros, group_depth)


def unpacked(packed: torch.Tensor, factor: torch.Tensor, outputs: int, depth: int, gated: bool = False) -> Codes:
    """What a packed weight says, its factors in its scales."""
    weight = unpack_codes(packed, outputs, depth, gated)
    return replace(weight, scales=weight.scales * unpack(factor.view(-1, 1, 64, 1), outputs, 1, gated))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "depth"), [(2, 1), (66, 32), (320, 70), (1200, 33)])
def test_packing_keeps_codes_scales_and_zero_points(outputs, depth, gated):
    weight = random_codes(outputs, depth)
    packed, factor = pack_codes(weight, gated)
    assert packed.shape[1:] == (-(-depth // 32), 1216) and packed.is_contiguous()
    found = unpacked(packed, factor, outputs, depth, gated)
    assert torch.equal(found.codes, weight.codes) and torch.equal(found.zeros, weight.zeros)
    assert torch.equal(found.scales, weight.scales)
    plain = normal(outputs, depth)
    packed, factor = pack(plain, WITH_SCALES, gated)
    assert packed.shape[1:] == (-(-depth // 32), 1152)
    assert torch.equal(unpacked(packed, factor, outputs, depth, gated).dequantize(), round_to_codes(plain).dequantize())


def test_scales_of_any_size_are_kept():
    """Those of one output within 2^29 of its largest, in float16's 11 bits; less than that is nothing beside it."""
    weight = random_codes(4, 96)
    for size in (2.0**-120, 1e-20, 1.0, 2.0**100):
        scaled = replace(weight, scales=weight.scales * 2.0 ** round(torch.tensor(size).log2().item()))
        assert torch.equal(unpacked(*pack_codes(scaled), 4, 96).scales, scaled.scales)
    scales = torch.tensor([[1.0, 2.0**-28, 0.0], [0.0] * 3, [3.0, 2.0**-40, -3.0], [1.0, -1.0, 2.0**-27]])
    found = unpacked(*pack_codes(replace(weight, scales=scales)), 4, 96).scales
    scales[2, 1] = 0
    assert torch.equal(found, scales)


@pytest.mark.parametrize("zero_points", [False, True])
def test_rounding_is_better_than_by_the_largest_magnitude(zero_points):
    """And no weight is farther from its code than half a scale, but where clipping pays."""
    weight = normal(64, 200, seed=5).float()
    rounded = round_to_codes(weight, zero_points)
    groups = torch.nn.functional.pad(weight, (0, 24)).view(64, 7, 32)
    scale = groups.abs().amax(2, keepdim=True) / 7
    plain = ((groups / scale).round() * scale).view(64, -1)[:, :200]
    error = (rounded.dequantize() - weight).square().sum()
    assert error < 0.8 * (plain - weight).square().sum()
    scales = rounded.scales.repeat_interleave(32, 1)[:, :200]
    is_inner = (rounded.codes > 0) & (rounded.codes < 15)
    assert ((rounded.dequantize() - weight).abs() <= 0.5001 * scales.abs())[is_inner].all()
    assert torch.equal(round_to_codes(torch.zeros(3, 40), zero_points).dequantize(), torch.zeros(3, 40))


@pytest.mark.parametrize("zero_points", [False, True])
def test_weights_of_any_size_are_rounded_alike(zero_points):
    """Up to bfloat16's largest, and one of that size among others."""
    weight = normal(6, 70, seed=5).float()
    want = round_to_codes(weight, zero_points).dequantize()
    for size in (2.0**-100, 2.0**-80, 2.0**100, 2.0**125):
        assert torch.equal(round_to_codes(weight * size, zero_points).dequantize(), want * size)
    weight[1, 3], largest = 1.0, torch.finfo(torch.bfloat16).max
    weight[1, :32] *= 0
    weight[1, 3] = largest
    found = round_to_codes(weight, zero_points).dequantize()
    assert torch.equal(found[[0, 2, 3, 4, 5]], want[[0, 2, 3, 4, 5]])
    assert found[1, 3] == pytest.approx(largest, rel=SCALE_ROUNDING) and found.isfinite().all()


def test_zero_points_serve_groups_of_one_sign():
    weight = normal(20, 64).float().abs() + 1
    errors = [(round_to_codes(weight, kind).dequantize() - weight).square().sum() for kind in (False, True)]
    assert errors[1] < errors[0]
    assert (round_to_codes(weight, True).zeros == 0).all() and (round_to_codes(-weight, True).zeros == 15).all()


def test_parts_are_joined_with_every_code_as_it_was():
    wide, narrow, rounded = random_codes(3, 200, 128), random_codes(2, 200, 64, seed=1), round_to_codes(normal(4, 200))
    joined = join([wide, narrow, rounded])
    assert joined.group_depth == 32 and joined.zeros is not None
    want = torch.cat([part.dequantize() for part in (wide, narrow, rounded)])
    assert torch.equal(joined.dequantize(), want)
    assert join([rounded, rounded]).zeros is None


def run(x, weight, scales, out_features, bias=None, residual=None, float32_out=True):
    """The operator's result, checked to be the reference's in every bit."""
    arguments = (x, weight, scales, bias, None, residual, out_features, 0.0, False, float32_out)
    got = torch.ops.kvforge.packed_linear(*arguments)
    torch.testing.assert_close(got, REFERENCE(*arguments), rtol=0, atol=0, equal_nan=True)
    return got


def random_weight(kind: torch.dtype, outputs: int, depth: int) -> Codes | SteppedCodes:
    codes = random_codes(outputs, depth)
    if kind != IN_STEPS:
        return codes if kind == WITH_ZEROS else replace(codes, zeros=None)
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(-15, 16, codes.scales.shape, generator=generator).to(torch.int8)
    return SteppedCodes(codes.codes, steps, torch.rand(outputs, generator=generator) / 50)


@pytest.mark.parametrize("kind", INT4, ids=str)
def test_every_bit_is_the_references(isa, kind):
    """Every tile height, depths that fill no group, outputs that fill no panel, two and three blocks of the depth."""
    shapes = [*itertools.product(range(1, 15), (64,), (40,)), *itertools.product((7,), (1, 65, 150), (1, 31, 32, 130))]
    shapes += [(200, 70, 96), (13, 40, 2310), (17, 40, 2310), (300, 65, 33), (70, 64, 1070)]
    for rows, outputs, depth in shapes:
        weight, scales = pack_codes(random_weight(kind, outputs, depth))
        x, bias, residual = normal(rows, depth, seed=1), normal(outputs, seed=2), normal(rows, outputs, seed=3)
        run(x, weight, scales, outputs)
        run(x, weight, scales, outputs, bias, residual, float32_out=False)


def test_nothing_saturates_at_the_ends_of_the_range(isa):
    """All products of a group of one sign and size: their sums in 16 bits are the largest there are."""
    depth = 4100
    for row_sign, code, zero in itertools.product((1, -1), (0, 15), (0, 8, 15)):
        whole = torch.full((64, 1), code, dtype=torch.uint8).expand(64, depth).contiguous()
        groups = torch.full((64, -(-depth // 32)), zero, dtype=torch.uint8)
        weight, scales = pack_codes(Codes(whole, groups.new_full(groups.shape, 2).float(), groups))
        got = run(torch.full((7, depth), row_sign * 3.0).bfloat16(), weight, scales, 64)
        # Equal integers and powers of two: nothing rounds but the row's scale, 3/127, and the product with it.
        want = torch.full_like(got, row_sign * 127 * (code - zero) * 2.0 * depth) * torch.tensor(3.0 / 127)
        assert torch.equal(got, want)
    for rows, row_sign, code, sign in itertools.product((7, 40), (1, -1), (0, 15), (1, -1)):
        whole = torch.full((64, 1), code, dtype=torch.uint8).expand(64, 65536).contiguous()
        stepped = SteppedCodes(whole, torch.full((64, 2048), sign * 15, dtype=torch.int8), torch.full((64,), 2.0))
        got = run(torch.full((rows, 65536), row_sign * 3.0).bfloat16(), *pack_codes(stepped), 64)
        want = torch.full_like(got, row_sign * 127 * (code - 8) * sign * 15.0 * 65536) * torch.tensor(3.0 / 127) * 2
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("kind", [IN_STEPS, WITH_SCALES], ids=str)
def test_a_row_that_is_not_finite_leaves_the_others_alone(isa, kind, rows):
    weight, scales = pack(normal(66, 70) / 8, kind)
    x = normal(rows, 70, seed=1)
    want = run(x, weight, scales, 66)
    x[1, 5], x[3] = float("nan"), float("inf")
    got = run(x, weight, scales, 66)
    others = [row for row in range(rows) if row not in (1, 3)]
    assert got[[1, 3]].isnan().all() and torch.equal(got[others], want[others])


def squared_error(weight: torch.Tensor, rounded: Codes | SteppedCodes) -> float:
    return (rounded.dequantize() - weight).square().sum().item()


def test_steps_cost_little_exactness():
    """A scale in 15 steps is off by a thirtieth of the largest at most, which adds 4% to the squared error of normal
    numbers; a row whose groups are of very different size has more, its small groups the most."""
    weight = normal(64, 1024, seed=5).float()
    assert squared_error(weight, round_in_steps(weight)) < 1.06 * squared_error(weight, round_to_codes(weight))
    weight[:, :32] *= 10
    assert squared_error(weight, round_in_steps(weight)) < 1.6 * squared_error(weight, round_to_codes(weight))


def test_rounding_in_steps_holds_for_any_size():
    """Rows of zeros, groups of zeros, a weight of bfloat16's largest number, depths that fill no group."""
    weight = normal(6, 70, seed=5).float()
    want = round_in_steps(weight)
    for size in (2.0**-100, 2.0**100, 2.0**125):
        found = round_in_steps(weight * size)
        assert torch.equal(found.dequantize(), want.dequantize() * size)
    weight[0], weight[2, 32:64] = 0, 0
    weight[4, 3] = torch.finfo(torch.bfloat16).max
    found = round_in_steps(weight)
    assert found.dequantize().isfinite().all() and found.steps.abs().max() == 15
    assert (found.dequantize()[0] == 0).all() and (found.dequantize()[2, 32:64] == 0).all()
    assert torch.equal(found.dequantize()[[1, 3, 5]], want.dequantize()[[1, 3, 5]])
    assert found.dequantize()[4, 3] == pytest.approx(weight[4, 3].item(), rel=OF_THE_LARGEST_CODE)


def test_codes_whose_scales_are_whole_steps_are_kept():
    stepped = round_in_steps(normal(20, 130).float())
    scales = stepped.steps.float() * stepped.scales[:, None]
    for stored in (scales, scales.half().float()):
        found = in_steps(Codes(stepped.codes, stored))
        assert torch.equal(found.codes, stepped.codes) and torch.equal(found.steps, stepped.steps)
        torch.testing.assert_close(found.scales, stepped.scales, rtol=SCALE_ROUNDING, atol=0)
    assert in_steps(random_codes(20, 130)) is None  # zero points
    assert in_steps(replace(random_codes(20, 130), zeros=None)) is None
    row = Codes(stepped.codes, torch.full((20, 1), 0.125), group_depth=160)  # one scale for a whole row
    torch.testing.assert_close(in_steps(row).dequantize(), row.dequantize(), rtol=ROUNDED_TWICE, atol=0)
