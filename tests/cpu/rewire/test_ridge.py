"""Ridge regression towards a prior, against solving the same problem in one piece."""

import dataclasses
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from kvforge.common.errors import KvforgeError
from kvforge.rewire import RewireOptions, inputs, rewire_checkpoint
from kvforge.rewire.cut_search import measure_cuts
from kvforge.rewire.exit_head import EXIT_HEAD, EXIT_NORM, exit_tensors, fit_exit_map
from kvforge.rewire.initialise import group_of
from kvforge.rewire.inputs import LayerInputs, record_inputs
from kvforge.rewire.least_squares import InputSums, ResidualSums, Unexplained, solve
from kvforge.rewire.projections import normalise, read_projection
from kvforge.rewire.ridge import CutFit, fit_states, prior
from kvforge.rewire.source import PlainCheckpoint, open_source
from model_defs import ModelConfig
from model_defs.linear import LinearAttention
from model_defs.mamba2 import Mamba2
from model_defs.reference import reference_hidden, reference_logits
from tests.support.models.checkpoints import FAMILIES, MAMBA, load_weights, make_checkpoint
from tests.support.rounding import assert_near, assert_within, model_error, sum_error

HIDDEN, OUTPUTS = 12, 5
LINEAR, FULL = "linear_attention", "full_attention"
STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": [LINEAR, FULL, LINEAR, LINEAR]},
    "qwen3_next": {"layer_types": [LINEAR, FULL, LINEAR, LINEAR]},
    "lfm2": {"full_attn_idxs": [1], "layer_types": None},
    "granitemoehybrid": MAMBA,
    "bamba": {"attn_layer_indices": [1], "attention_bias": True},
}
"""Families of each kind of layers with a state, the second of four with attention."""


ROUNDED = 1e-9
"""Shares that are squares of fp32's errors: (64 terms of 1.2e-7)^2 is 6e-11 of what is explained."""


def solved_error(rows: int, ridge: float, size: int = HIDDEN) -> float:
    """Relative error of a solution by normal equations and Cholesky's factor in fp64: the condition number times what
    the sums round and n gamma(3 n + 1) (Higham, theorem 10.4 and equation 10.7). The penalty is ``ridge`` times the
    mean square, which bounds the condition number by 1 + size / ridge."""
    backward = sum_error(rows, dtype=torch.float64) + size * sum_error(3 * size + 1, dtype=torch.float64)
    return backward * (1 + size / ridge)


def brute_force(x: Tensor, y: Tensor, w0: Tensor, ridge: float, intercept: bool) -> tuple[Tensor, Tensor]:
    """Least squares on the data with sqrt(lambda) I stacked below it, whose target is the prior's."""
    size = x.shape[1]
    root = (ridge * x.square().sum() / size).sqrt() * torch.eye(size, dtype=x.dtype)
    rows, targets = torch.cat((x, root)), torch.cat((y, root @ w0.T))
    if intercept:
        ones = torch.cat((torch.ones(len(x), 1), torch.zeros(size, 1))).to(x.dtype)
        rows = torch.cat((rows, ones), 1)
    solution = torch.linalg.lstsq(rows, targets, driver="gelsd").solution
    return solution[:size].T, solution[size] if intercept else torch.zeros(y.shape[1], dtype=x.dtype)


def fitted(x: Tensor, y: Tensor, w0: Tensor, b0: Tensor, ridge: float, intercept: bool, chunk: int):
    sums, residuals = InputSums(x.shape[1], intercept), ResidualSums(x.shape[1], y.shape[1])
    for rows, targets in zip(x.split(chunk), y.split(chunk), strict=True):
        sums.add(rows)
        residuals.add(rows, targets - rows @ w0.T - b0)
    delta, shift = solve(sums, sums.factor(ridge), residuals)
    return w0 + delta, b0 + shift


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("tokens", [3, HIDDEN, 200])  # fewer than the hidden size: rank-deficient
@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 10.0])
def test_equals_least_squares_in_one_piece(intercept: bool, tokens: int, ridge: float) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64) + 0.5
    y, w0 = torch.randn(tokens, OUTPUTS).double(), torch.randn(OUTPUTS, HIDDEN).double()
    b0 = torch.randn(OUTPUTS).double() if intercept else torch.zeros(OUTPUTS).double()
    expected = brute_force(x, y, w0, ridge, intercept)
    for chunk in (1, 7, tokens):
        for got, want in zip(fitted(x, y, w0, b0, ridge, intercept, chunk), expected, strict=True):
            assert_near(got, want, solved_error(tokens + HIDDEN, ridge))


def test_directions_without_data_keep_the_prior() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64))[0]
    x = torch.randn(50, 4, dtype=torch.float64) @ basis[:, :4].T
    y, w0 = torch.randn(50, OUTPUTS).double(), torch.randn(OUTPUTS, HIDDEN).double()
    weight, _ = fitted(x, y, w0, torch.zeros(OUTPUTS).double(), 1e-3, False, 50)
    assert_near(weight @ basis[:, 4:], w0 @ basis[:, 4:], solved_error(50, 1e-3))
    assert (weight @ basis[:, :4] - w0 @ basis[:, :4]).abs().max() > 0.1


def test_unexplained_share_by_hand() -> None:
    """K is 1, 3 predicted as 1, 2: missed 1 of a variance of 2. V is predicted exactly."""
    unexplained = Unexplained()
    unexplained.add(torch.tensor([[1.0, 5.0]]).double(), torch.tensor([[1.0, 5.0]]).double())
    unexplained.add(torch.tensor([[3.0, 7.0]]).double(), torch.tensor([[2.0, 7.0]]).double())
    assert unexplained.shares([1, 1]) == (0.5, 0.0)


def test_the_share_of_constant_targets_by_hand() -> None:
    """K is 0 and 0, predicted exactly: nothing is missed. V is 3 and 3, predicted as 3 and 1: it misses 4, of a
    variance that is taken as 18 times the rounding of float32."""
    unexplained = Unexplained()
    unexplained.add(torch.tensor([[0.0, 3.0], [0.0, 3.0]]).double(), torch.tensor([[0.0, 3.0], [0.0, 1.0]]).double())
    assert unexplained.shares([1, 1]) == (0.0, pytest.approx(4 / (18 * 2.0**-23)))


def recorded(
    path: Path, family: str, first: int = 0, with_output: bool = False, **sizes
) -> tuple[PlainCheckpoint, LayerInputs, list[list[int]]]:
    source = open_source(make_checkpoint(path / "source", family, num_hidden_layers=4, **sizes))
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(3, 250, (length,), generator=generator).tolist() for length in (40, 33, 40, 17, 29)]
    directory = path / "inputs"
    directory.mkdir()
    return source, record_inputs(source, samples, directory, first, with_output=with_output), samples


@pytest.mark.parametrize("family", [*FAMILIES, *STATES])
def test_recorded_inputs_are_the_references(family: str, tmp_path: Path) -> None:
    sliding = {"sliding_window": 8} if family == "mistral" else {}
    source, found, samples = recorded(tmp_path, family, first=2, **sliding, **STATES.get(family, {}))
    weights = load_weights(source.checkpoint.path)
    assert not found.file(0).exists() and not found.file(1).exists()
    for index, ids in enumerate(samples):
        states = reference_hidden(source.config, weights, torch.tensor(ids))
        for layer in (2, 3):
            assert_near(found.read(layer, index), states[layer], model_error(source.config, len(ids)))


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
def test_an_owner_is_fitted_to_the_mean_of_its_group(family: str, tmp_path: Path) -> None:
    """K, V of two layers from the input of the cut, against one piece; no worse than fold on what was fitted."""
    source, found, _ = recorded(tmp_path, family)
    config = dataclasses.replace(source.config, cut=1, group_size=2)
    layers = list(group_of(1, config))
    assert layers == [1, 2]
    group = [read_projection(source, layer) for layer in layers]
    cut = CutFit(source, found, 1, 1e-3, "cpu")
    weight, bias = cut.fit(layers, group)
    x = torch.cat([cut.single_input(sample) for sample in found.fitted])
    weights = load_weights(source.checkpoint.path)
    targets = []
    for layer in layers:
        prefix = f"model.layers.{layer}"
        hidden = torch.cat([found.read(layer, sample) for sample in found.fitted]).double()
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        normed = normed * weights[f"{prefix}.input_layernorm.weight"].double()
        for part in ("k", "v"):
            name = f"{prefix}.self_attn.{part}_proj"
            targets.append(normed @ weights[f"{name}.weight"].double().T + weights.get(f"{name}.bias", torch.tensor(0)))
    y = torch.cat(((targets[0] + targets[2]) / 2, (targets[1] + targets[3]) / 2), 1)
    expected = brute_force(x, y, prior(group)[0], 1e-3, config.qkv_bias)
    rounding = solved_error(len(x) + config.hidden_size, 1e-3, config.hidden_size)
    assert_within(weight, expected[0], rounding * expected[0].abs().max())
    assert_within(bias, expected[1], rounding * expected[0].abs().max())
    fold_weight, fold_bias = prior(group)
    missed = (y - x @ weight.T - bias).square().sum()
    assert missed < 0.9 * (y - x @ fold_weight.T - fold_bias).square().sum()


def rows_of_states(config: ModelConfig, weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """What a layer multiplies with its input to update its state, by the tensors of the cut that it is in."""
    linear = config.linear
    prefix = f"model.layers.{layer}.{linear.module}.in_proj"
    if isinstance(linear, LinearAttention):
        keys = linear.num_key_heads * linear.key_dim
        parts = ("qkvz", "ba") if linear.by_key_head else ("qkv", "b", "a")
        own = [weights[f"{prefix}_{part}.weight"] for part in parts]
        if linear.by_key_head:
            values = linear.num_value_heads // linear.num_key_heads * linear.value_dim
            sizes = [linear.key_dim, linear.key_dim, values, values]
            qkvz, ba = (rows.unflatten(0, (linear.num_key_heads, -1)) for rows in own)
            own = [torch.cat([part.flatten(0, 1) for part in qkvz.split(sizes, 1)[:3]])]
            own += [part.flatten(0, 1) for part in ba.chunk(2, 1)]
        made = {"kv": own[0][keys:], "b": own[1], "a": own[2]}
    elif isinstance(linear, Mamba2):
        sizes = [linear.inner_dim, linear.conv_channels, linear.num_heads]
        _, channels, steps = weights[f"{prefix}.weight"].split(sizes)
        made = {"xbc": channels, "dt": steps}
    else:
        b, _, x = weights[f"{prefix}.weight"].chunk(3)
        made = {"bx": torch.cat((b, x))}
    return {f"{prefix}_{part}_swiftkv.weight": rows for part, rows in made.items()}


@pytest.mark.parametrize("family", STATES)
def test_what_updates_a_state_is_fitted_to_the_layers_own(family: str, tmp_path: Path) -> None:
    """Against one piece, without an intercept where the model's attention has biases too; no worse than fold."""
    source, found, _ = recorded(tmp_path, family, **STATES[family])
    config = dataclasses.replace(source.config, cut=1)
    assert config.is_linear(2) and config.is_linear(3)
    fits, tensors = fit_states(source, config, found, 1e-3)
    assert [fit.layer for fit in fits] == list(config.upper_linear)
    weights = load_weights(source.checkpoint.path)
    stream = {
        layer: torch.cat([normalise(found.read(layer, sample), config.rms_norm_eps) for sample in found.fitted])
        for layer in (1, 2, 3)
    }
    for fit in fits[-2:]:
        gain = weights[f"model.layers.{fit.layer}.input_layernorm.weight"].double() + config.norm_offset
        for name, rows in rows_of_states(config, weights, fit.layer).items():
            folded = rows.double() * gain
            y = stream[fit.layer] @ folded.T
            expected = brute_force(stream[1], y, folded, 1e-3, False)[0]
            got = tensors[name]()
            assert got.dtype == torch.float32
            rounding = solved_error(len(y) + config.hidden_size, 1e-3, config.hidden_size) + 2.0**-24
            assert_within(got.double(), expected, rounding * expected.abs().max())
            missed, by_fold = ((y - stream[1] @ made.T).square().sum() for made in (got.double(), folded))
            assert missed < 0.9 * by_fold


def test_cuts_are_compared_by_what_a_cut_can_have(tmp_path: Path) -> None:
    """What updates a state is fitted without an intercept, also where K and V of the model have one."""
    source, found, _ = recorded(tmp_path, "bamba", first=1, **STATES["bamba"])
    assert source.config.qkv_bias
    for candidate in measure_cuts(source, found, torch.ones(4, 4).double(), 1e-3)[:2]:
        fits, _ = fit_states(source, dataclasses.replace(source.config, cut=candidate.cut), found, 1e-3)
        worst = max(share for fit in fits for share in fit.shares.values())
        assert worst > 1e-3 and candidate.worst_residual == pytest.approx(worst)


@pytest.mark.parametrize("family", STATES)
def test_a_cut_with_states_has_what_was_fitted(family: str, tmp_path: Path) -> None:
    """A regulariser that outweighs the text leaves fold's; with a small one all layers at the cut are exact."""
    source = make_checkpoint(tmp_path / "source", family, **{"num_hidden_layers": 4} | STATES[family])
    text = tmp_path / "text.txt"
    text.write_text("A man, a plan, a canal: Panama! 3.14159265358979 " * 200)
    made = {}
    for name, ridge in (("stiff", 1e9), ("soft", 1e-3)):
        options = RewireOptions(2, init="ridge", ridge=ridge, num_samples=8, num_tokens=64)
        summary = rewire_checkpoint(source, tmp_path / name, options, calibration=text)
        made[name] = load_weights(tmp_path / name)
        at_cut, *above = summary.states
        assert at_cut.layer == 2 and all(share < ROUNDED for share in at_cut.shares.values())
        assert [fit.layer for fit in above] == [3]
        assert name == "stiff" or all(0 < share < above[0].fold[part] for part, share in above[0].shares.items())
    rewire_checkpoint(source, tmp_path / "fold", RewireOptions(2, init="fold"))
    fold = load_weights(tmp_path / "fold")
    new = [name for name in fold if "_swiftkv." in name]
    assert any("in_proj" in name for name in new) and set(made["soft"]) == set(fold)
    for name in new:
        assert_within(made["stiff"][name], fold[name], 1e-6 * fold[name].abs().max())
    last = [
        name
        for name in new
        if name.startswith("model.layers.3.")
        and name.endswith(("_bx_swiftkv.weight", "_dt_swiftkv.weight", "_a_swiftkv.weight"))
    ]
    assert last and all((made["soft"][name] - fold[name]).abs().max() > 1e-3 for name in last)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # a norm's gain as it is, and above 1
def test_an_exit_is_fitted_to_the_final_norms_output(family: str, tmp_path: Path) -> None:
    """Its map against one piece, its logits against that map, and nearer to the model's than the copied head's."""
    source, found, samples = recorded(tmp_path, family, first=2, with_output=True)
    config, weights = source.config, load_weights(source.checkpoint.path)
    gain = weights["model.norm.weight"].double() + config.norm_offset
    x, last = (
        torch.cat([normalise(found.read(layer, sample), config.rms_norm_eps) for sample in found.fitted])
        for layer in (2, config.num_layers)
    )
    fitted = fit_exit_map(source, found, 2, 1e-3)
    expected = brute_force(x, last * gain, torch.diag(gain), 1e-3, False)[0]
    assert_within(fitted, expected, solved_error(len(x) + len(gain), 1e-3, len(gain)) * expected.abs().max())
    head = weights["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"].double()
    tensors = exit_tensors(source, fitted)
    assert torch.equal(tensors[EXIT_NORM]() + config.norm_offset, torch.ones(len(gain)))
    got, wanted = x.float() @ tensors[EXIT_HEAD]().float().T, last * gain @ head.T
    assert_near(got, x @ expected.T @ head.T, model_error(config, len(x)))
    assert (got - wanted).square().sum() < 0.9 * (x * gain @ head.T - wanted).square().sum()
    logits = reference_logits(config, weights, torch.tensor(samples[0]))
    assert_near(wanted[: len(samples[0])], logits, model_error(config, len(samples[0])))


def test_an_exit_that_cannot_be_fitted_is_named(tmp_path: Path) -> None:
    source, found, _ = recorded(tmp_path, "llama", with_output=True)
    found.file(2).write_bytes(bytes(found.file(2).stat().st_size))
    with pytest.raises(KvforgeError, match=r"early exit of cut 2 cannot be fitted with --ridge 0.01; give a larger"):
        fit_exit_map(source, found, 2, 1e-2)


def test_rewiring_with_a_fit_fits_the_exit(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=4)
    text = tmp_path / "text.txt"
    text.write_text("A man, a plan, a canal: Panama! 3.14159265358979 " * 200)
    options = RewireOptions(cut=2, init="ridge", early_exit=True, num_samples=16, num_tokens=64)
    rewire_checkpoint(source, tmp_path / "out", options, calibration=text)
    old, new = load_weights(source), load_weights(tmp_path / "out")
    assert torch.equal(new[EXIT_NORM], torch.ones_like(old["model.norm.weight"]))
    assert (new[EXIT_HEAD] - old["lm_head.weight"] * old["model.norm.weight"]).abs().max() > 1e-3


def test_held_out_samples_do_not_change_the_fit(tmp_path: Path) -> None:
    source, found, _ = recorded(tmp_path, "llama")
    assert found.held_out == [4] and found.fitted == [0, 1, 2, 3]
    group = [read_projection(source, 3)]

    def fit() -> Tensor:
        return CutFit(source, found, 2, 1e-3, "cpu").fit([3], group)[0]

    before = fit()
    for layer in (2, 3):
        with found.file(layer).open("r+b") as file:
            file.seek(found.starts[4] * found.hidden_size * 4)
            file.write(b"\0" * 4096)
    assert torch.equal(fit(), before)


def test_one_layer_is_alive_at_a_time(tmp_path: Path, monkeypatch) -> None:
    alive: WeakSet = WeakSet()

    class Counted(inputs.DecoderLayer):
        def __init__(self, *arguments) -> None:
            assert not alive
            super().__init__(*arguments)
            alive.add(self)
            made.append(arguments[1])

    made: list[int] = []
    monkeypatch.setattr(inputs, "DecoderLayer", Counted)
    recorded(tmp_path, "llama")
    assert made == [0, 1, 2]  # what enters the last layer needs no more


def test_summary_says_what_is_missed(tmp_path: Path) -> None:
    """At the cut itself nothing is; above it ridge misses less than fold; shares of a group are of its mean."""
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=6)
    text = tmp_path / "text.txt"
    text.write_text("A man, a plan, a canal: Panama! 3.14159265358979 " * 200)
    options = RewireOptions(cut=2, init="ridge", num_samples=40, num_tokens=100)
    alone = rewire_checkpoint(source, tmp_path / "alone", options, calibration=text).owners
    assert [fit.owner for fit in alone] == [2, 3, 4, 5]
    assert alone[0].k < ROUNDED and alone[0].v < ROUNDED
    assert all(0 < fit.k < fit.fold_k and 0 < fit.v < fit.fold_v for fit in alone[1:])
    assert all(fit.layers_k == fit.k and fit.layers_v == fit.v for fit in alone)
    grouped = rewire_checkpoint(
        source, tmp_path / "grouped", dataclasses.replace(options, group_size=4), calibration=text
    ).owners
    assert [fit.layers for fit in grouped] == [(2, 3, 4, 5)]
    assert grouped[0].layers_k > grouped[0].k and grouped[0].layers_v > grouped[0].v
