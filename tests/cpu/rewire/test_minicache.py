"""MiniCache's merge against its geometry, vector by vector, and the projections that are fitted to it."""

import string
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvforge.common.errors import KvforgeError
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.rewire.minicache import INTERPOLATION, MergeRule, distance, merge, shared_target, threshold
from model_defs.rope import apply_rope, rope_cos_sin
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.rounding import FP32, sum_error

DIM = 8
CLOSE = sum_error(8 * DIM, dtype=torch.float64) * 100
"""Sums of DIM terms, and sines and arc tangents; sines of random angles are above a hundredth."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def angle_between(a: Tensor, b: Tensor) -> Tensor:
    return torch.arccos((a @ b / (a.norm() * b.norm())).clamp(-1, 1))


def merged_by_rotation(lower: Tensor, upper: Tensor, interpolation: float) -> Tensor:
    """From the lower direction the rest of the angle towards the upper one, in the plane of both."""
    a = lower / lower.norm()
    across = upper - (upper @ a) * a
    turn = (1 - interpolation) * angle_between(lower, upper)
    return turn.cos() * a + turn.sin() * across / across.norm()


@pytest.mark.parametrize("interpolation", [0.0, 0.3, 0.6, 1.0])
def test_directions_lie_between_and_lengths_are_kept(interpolation: float) -> None:
    lower, upper = normal(5, 3, DIM), 4 * normal(5, 3, DIM, seed=1)
    merged = merge(lower, upper, interpolation, limit=1.0)
    assert not merged.retained.any()
    restored = merged.restore(lower, upper)
    for place in torch.cartesian_prod(torch.arange(5), torch.arange(3)):
        at = tuple(place)
        expected = merged_by_rotation(lower[at], upper[at], interpolation)
        torch.testing.assert_close(merged.direction[at], expected, rtol=0, atol=CLOSE)
        assert distance(lower[at], upper[at]) * torch.pi == pytest.approx(float(angle_between(lower[at], upper[at])))
        for own, found in zip((lower[at], upper[at]), restored, strict=True):
            torch.testing.assert_close(found[at], expected * own.norm(), rtol=0, atol=CLOSE * own.norm())


def test_zero_parallel_and_opposite_vectors() -> None:
    """A zero vector restores as zero and leaves the other as it is; parallel ones are both restored; opposite ones, and
    those all but opposite, have no direction between them and are retained whatever the limit."""
    one, zero = normal(DIM), torch.zeros(DIM).double()
    nearly = -one + 1e-12 * normal(DIM, seed=3)
    lower = torch.stack([zero, one, zero, one, one, one])
    upper = torch.stack([one, zero, zero, 3 * one, -2 * one, nearly])
    merged = merge(lower, upper, INTERPOLATION, limit=1.0)
    assert merged.retained.tolist() == [False, False, False, False, True, True]
    assert distance(lower, upper)[:4].tolist() == [0, 0, 0, 0]
    for found, own in zip(merged.restore(lower, upper), (lower, upper), strict=True):
        torch.testing.assert_close(found, own, rtol=0, atol=CLOSE * 4)
    assert merged.direction.isfinite().all()


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_lengths_may_be_tiny_or_huge(scale: float) -> None:
    lower, upper = normal(4, DIM), normal(4, DIM, seed=1)
    plain, scaled = (merge(lower * factor, upper, INTERPOLATION, 1.0) for factor in (1, scale))
    torch.testing.assert_close(scaled.direction, plain.direction, rtol=0, atol=CLOSE)


def test_the_far_end_of_the_distances_is_retained() -> None:
    distances = torch.linspace(0.2, 1.0, 101).double()[:, None]
    kept = [(distances > threshold(distances, gamma, dim=0)).sum() for gamma in (0.0, 0.055, 0.505, 1.0)]
    assert kept == [0, 6, 51, 100]
    alike = torch.full((7, 2), 0.4)
    assert not (alike > threshold(alike, 0.05, dim=0)).any()


def test_merging_before_or_after_rope_is_the_same() -> None:
    lower, upper = (normal(9, 2, DIM, seed=seed).float() for seed in (0, 1))
    cos, sin = rope_cos_sin(torch.arange(9)[None], 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))
    rotate = partial(apply_rope, cos=cos, sin=sin)
    before = rotate(merge(lower, upper, INTERPOLATION, 1.0).direction[None])
    after = merge(rotate(lower[None]), rotate(upper[None]), INTERPOLATION, 1.0).direction
    torch.testing.assert_close(before, after, rtol=0, atol=sum_error(8 * DIM, dtype=FP32) * 10)


def test_one_cache_is_fitted_to_the_direction_at_the_mean_length() -> None:
    """Heads of K and of V are vectors of their own; a token beyond its head's limit is the lower layer's."""
    heads, tokens, rule = 4, 6, MergeRule(retention=0.3)
    lower, upper = normal(tokens, heads * DIM), normal(tokens, heads * DIM, seed=1)
    found = shared_target([lower, upper], DIM, rule).view(tokens, heads, DIM)
    retained = 0
    for head in range(heads):
        a, b = (x.view(tokens, heads, DIM)[:, head] for x in (lower, upper))
        angles = [float(angle_between(*pair)) for pair in zip(a, b, strict=True)]
        limit = max(angles) - rule.retention * (max(angles) - min(angles))
        for token in range(tokens):
            length = (a[token].norm() + b[token].norm()) / 2
            merged = length * merged_by_rotation(a[token], b[token], rule.interpolation)
            far = angles[token] > limit
            torch.testing.assert_close(found[token, head], a[token] if far else merged, rtol=0, atol=CLOSE * length)
            retained += far
    assert heads <= retained < heads * tokens / 2
    assert shared_target([lower], DIM) is lower


FITTED = 0.01
"""What a regulariser of 1e-6 of the mean square leaves of a projection that begins at zero; another target would be off
by 1."""


def test_rewiring_fits_the_merged_pair(tmp_path: Path) -> None:
    """Two layers with the same input, K and gains, and opposite V: the merged K is theirs, and V, which cannot merge,
    is the owner's. The mean, which ridge takes, is nothing at all."""
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=3)
    weights = load_weights(source)
    for name in ("self_attn.k_proj", "input_layernorm"):
        weights[f"model.layers.2.{name}.weight"] = weights[f"model.layers.1.{name}.weight"].clone()
    weights["model.layers.2.self_attn.v_proj.weight"] = -weights["model.layers.1.self_attn.v_proj.weight"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.1.{name}.weight"].zero_()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text("".join(Random(0).choices(string.ascii_letters + string.digits, k=3000)))
    missed = {}
    for init in ("minicache", "ridge"):
        options = RewireOptions(cut=1, group_size=2, init=init, ridge=1e-6, num_samples=12, num_tokens=100)
        summary = rewire_checkpoint(source, tmp_path / init, options, calibration=text)
        assert summary.init == init and [fit.layers for fit in summary.owners] == [(1, 2)]
        new, gain = load_weights(tmp_path / init), weights["model.layers.1.input_layernorm.weight"]
        assert torch.equal(new["model.norm_swiftkv.weight"], torch.ones_like(gain))
        for part in ("k", "v"):
            own = gain * weights[f"model.layers.1.self_attn.{part}_proj.weight"]
            found = new[f"model.layers.1.self_attn.{part}_proj_swiftkv.weight"]
            missed[init, part] = float((found - own).norm() / own.norm())
    assert missed["minicache", "k"] < FITTED and missed["ridge", "k"] < FITTED
    assert missed["minicache", "v"] < FITTED and missed["ridge", "v"] == 1


@pytest.mark.parametrize("size", [1, 3, 4])
def test_layers_are_merged_in_pairs(size: int) -> None:
    with pytest.raises(KvforgeError, match=f"pairs and --group-size is {size}; give --group-size 2, or another --init"):
        RewireOptions(cut=2, group_size=size, init="minicache")
