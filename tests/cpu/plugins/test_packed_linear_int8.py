"""int8 weights of PackedLinear: equal to the reference in every bit, also at the ends of the range, on every ISA."""

import itertools

import torch

import plugins
from plugins.packed_linear import pack, rotated_rows
from tests.support.rounding import assert_near, gamma

ROUNDED = 0.03
"""Two operands off by half of 1/127 of their largest number at most, which is up to four times a usual one."""
REFERENCE = plugins.OPERATORS["packed_linear"].reference


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(x, weight, scales, out_features, bias=None, residual=None, float32_out=True, rotated=False):
    """The operator's result, checked to be the reference's in every bit."""
    arguments = (x, weight, scales, bias, None, residual, out_features, 0.0, False, float32_out, rotated)
    got = torch.ops.kvforge.packed_linear(*arguments)
    torch.testing.assert_close(got, REFERENCE(*arguments), rtol=0, atol=0, equal_nan=True)
    return got


def test_every_bit_is_the_references(isa):
    """Every tile height, depths that fill no group, outputs that fill no panel, two blocks of the depth."""
    shapes = [*itertools.product(range(1, 15), (64,), (8,)), *itertools.product((7,), (1, 65, 150), (1, 3, 31, 130))]
    for rows, outputs, depth in [*shapes, (200, 70, 96), (13, 40, 2310)]:
        weight, scales = pack(normal(outputs, depth), torch.int8)
        x, bias, residual = normal(rows, depth, seed=1), normal(outputs, seed=2), normal(rows, outputs, seed=3)
        run(x, weight, scales, outputs)
        run(x, weight, scales, outputs, bias, residual, float32_out=False)


def test_every_bit_is_the_references_where_rows_are_rotated(isa):
    """Blocks of every size up to the largest, and depths of several; what was rotated is what the product shows."""
    for depth in (1, 2, 3, 4, 8, 12, 16, 32, 48, 64, 96, 128, 256, 512, 768, 1152, 1536, 90, 130):
        plain = normal(65, depth).float()
        weight, scales = pack(rotated_rows(plain), torch.int8)
        x = normal(9, depth, seed=1)
        x[0, depth // 2] = 50.0  # an outlier
        got = run(x, weight, scales, 65, rotated=True)
        exact = x.double() @ plain.double().T
        assert float((got - exact).norm() / exact.norm()) < ROUNDED


def test_a_rotated_row_that_is_not_finite_gives_no_number(isa):
    weight, scales = pack(rotated_rows(normal(64, 256).float()), torch.int8)
    for value in (float("nan"), float("inf"), -float("inf")):
        x = normal(3, 256, seed=1)
        x[1, 7] = value
        got = run(x, weight, scales, 64, rotated=True)
        assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def test_nothing_saturates_at_the_ends_of_the_range(isa):
    """All products of one sign: a sum of two of them in 16 bits would saturate."""
    depth = 4100
    for row_sign, weight_sign in itertools.product((1, -1), repeat=2):
        weight, scales = pack(torch.full((64, depth), weight_sign * 2.0).bfloat16(), torch.int8)
        assert set(weight.unique().tolist()) == {127 * weight_sign}
        x = torch.full((7, depth), row_sign * 3.0).bfloat16()
        got = run(x, weight, scales, 64)
        # The sum is one of integers: two scales, their product and the sum's conversion and product round.
        assert_near(got, torch.full_like(got, row_sign * weight_sign * 6.0 * depth), gamma(5))


def test_values_between_two_integers_are_rounded_to_even(isa):
    """max|x| = 127 makes the scale 1, an identity shows the quantized values."""
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, -126.5]]).bfloat16()
    weight, scales = pack(torch.eye(9).bfloat16(), torch.int8)
    scales[0] = 1 / 127
    assert run(x, weight, scales, 9).round().tolist() == [[127, 0, 2, 2, 0, -2, -2, 64, -126]]


def test_quotients_are_rounded_as_a_division_does(isa):
    """Every mantissa below every largest one, where integers and halves lie, beside scales near the smallest too."""
    mantissas = torch.arange(128, 256)
    below = torch.cat([mantissas * 2.0**-exponent for exponent in range(9)])
    weight, scales = pack(torch.eye(1 + len(below)).bfloat16(), torch.int8)
    for factor in (1.0, 2.0**100, 2.0**-118, 2.0**-124, 2.0**-126):
        x = torch.cat([mantissas[:, None].float(), below.where(below <= mantissas[:, None], 0.0)], dim=1) * factor
        run(x.bfloat16(), weight, scales, 1 + len(below))


def test_rows_at_the_ends_of_the_float_range(isa):
    """Zeros give the bias, tiny and huge rows their product; a row that is not finite gives NaN, no other row does."""
    depth, outputs = 70, 66
    weight, scales = pack(normal(outputs, depth) / 8, torch.int8)
    bias = normal(outputs, seed=2)
    base = normal(9, depth, seed=1)
    want = run(base, weight, scales, outputs, bias)
    x = base.clone()
    x[0] = 0
    x[2] = 2.0**-133
    x[3] = 3e38
    x[4, 5], x[5, 69], x[6] = float("nan"), float("inf"), -float("inf")
    got = run(x, weight, scales, outputs, bias)
    assert torch.equal(got[0], bias.float())
    assert torch.equal(got[2], bias.float())  # 2^-133 is lost beside a bias
    assert not (got[3].abs() < 1e30).any()
    assert got[4:7].isnan().all()
    assert torch.equal(got[[1, 7, 8]], want[[1, 7, 8]])
    arguments = (x, weight, scales, None, normal(depth, seed=4), None, outputs // 2, 1e-5, True, False)
    gated = torch.ops.kvforge.packed_linear(*arguments)
    assert gated[4].isnan().all() and gated[[1, 7, 8]].isfinite().all()


def test_normed_and_gated_rows_are_near_the_reference(isa):
    """The mean square and the exponential differ in the last bit, so that a value may be quantized elsewhere."""
    for rows, inner, depth in ((1, 32, 64), (9, 33, 130), (70, 96, 200)):
        weight, scales = pack(normal(2 * inner, depth) / 8, torch.int8, gated=True)
        x, norm = normal(rows, depth, seed=1), normal(depth, seed=2)
        arguments = (x, weight, scales, None, norm, None, inner, 1e-5, True, True)
        got, want = torch.ops.kvforge.packed_linear(*arguments), REFERENCE(*arguments)
        assert_near(got, want, 1 / 127)  # a code of a row that is quantized elsewhere
