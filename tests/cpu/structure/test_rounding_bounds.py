"""Each bound of tests/support/rounding.py holds for other orders of the same sums, and for no wrong result."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvforge.kv_policies.shadowkv.factor import _leading_eigenvectors
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.rounding import (
    assert_near,
    assert_within,
    codes_apart,
    config_of,
    linear_bound,
    logprob_error,
    low_rank_error,
    model_error,
    relative_error,
    rounded_model_error,
    sum_error,
    turned_code_error,
)

TERMS = 400
IDS = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(0))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_order(terms: Tensor) -> Tensor:
    """The sum over the last dimension term by term, as no library takes it."""
    total = torch.zeros(terms.shape[:-1])
    for term in terms.unbind(-1):
        total = total + term
    return total


def test_sums_of_one_sign() -> None:
    terms = normal(50, TERMS).abs()
    for order in (in_order(terms), in_order(terms.flip(-1)), terms.sum(-1)):
        assert_near(order, terms.double().sum(-1), sum_error(TERMS))
    with pytest.raises(AssertionError, match="of the largest element"):
        assert_near(terms[:, 1:].sum(-1), terms.sum(-1), sum_error(TERMS))


def test_linear_layers() -> None:
    x, weight, bias = normal(30, TERMS), normal(20, TERMS, seed=1), normal(20, seed=2)
    exact, bound = x.double() @ weight.double().T + bias, linear_bound(x, weight, bias)
    for found in (x @ weight.T + bias, in_order(x[:, None] * weight) + bias, x.flip(1) @ weight.flip(1).T + bias):
        assert_within(found, exact, bound)
    wrong = (
        x[:, 1:] @ weight[:, 1:].T + bias,
        x @ weight.bfloat16().float().T + bias,
        x @ weight.T,
        x @ weight.T - bias,
    )
    for found in wrong:
        with pytest.raises(AssertionError, match="differs by up to"):
            assert_within(found, exact, bound)


def test_log_probabilities() -> None:
    logits = 3 * normal(30, TERMS)
    exact, largest = logits.double().log_softmax(-1), float(logits.abs().max())
    assert_within(logits.log_softmax(-1), exact, logprob_error(TERMS, largest))
    assert_within(logits - in_order(logits.exp()).log()[:, None], exact, logprob_error(TERMS, largest))
    noise = 1 + 1e-4 * (2 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(3)) - 1)
    assert_within((logits * noise).log_softmax(-1), exact, logprob_error(TERMS, largest, 1e-4))
    for wrong in (logits[:, 1:].log_softmax(-1), (logits * 1.001).log_softmax(-1)[:, 1:]):
        with pytest.raises(AssertionError, match="differs by up to"):
            assert_within(wrong, exact[:, 1:], logprob_error(TERMS, largest))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bounds") / "c", cut=2, group_size=2, num_hidden_layers=5)


def permuted(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model with its hidden and inner dimensions in another order: every sum is taken in that."""
    hidden, inner = torch.randperm(64, generator=torch.Generator().manual_seed(0)), torch.arange(96).flip(0)
    found = {}
    for name, tensor in weights.items():
        if "norm" in name or "o_proj" in name or "down_proj" in name:
            tensor = tensor[hidden]
        elif tensor.dim() == 2:
            tensor = tensor[:, hidden]
        if "gate_proj" in name or "up_proj" in name:
            tensor = tensor[inner]
        found[name] = tensor[:, inner] if "down_proj" in name else tensor
    return found


def test_models(checkpoint: Path) -> None:
    """An order of its own, within; one token in forty, a position too many, and a gain that is 0.03% off: not."""
    config, weights = config_of(checkpoint), load_weights(checkpoint)
    exact = reference_logits(config, {name: x.double() for name, x in weights.items()}, IDS)
    bound = model_error(config, len(IDS))
    for found in (reference_logits(config, weights, IDS), reference_logits(config, permuted(weights), IDS)):
        assert_near(found, exact, bound)
    other = IDS.clone()
    other[3] += 1
    name = "model.layers.1.input_layernorm.weight"
    gain = reference_logits(config, weights | {name: weights[name] * 1.0003}, IDS)
    shifted = reference_logits(config, weights, torch.cat((IDS[:1], IDS)))[1:]
    for wrong in (reference_logits(config, weights, other), gain, shifted):
        assert relative_error(wrong[20:], exact[20:]) > bound


def test_bf16_models(checkpoint: Path) -> None:
    config, weights = config_of(checkpoint), load_weights(checkpoint)
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    exact = reference_logits(config, {name: tensor.double() for name, tensor in rounded.items()}, IDS)
    bound = rounded_model_error(config, torch.bfloat16)
    assert_near(reference_logits(config, rounded, IDS), exact, bound)
    other = IDS.clone()
    other[-2:] += 1
    swapped = rounded | {"model.layers.1.mlp.up_proj.weight": rounded["model.layers.1.mlp.gate_proj.weight"]}
    for wrong in (reference_logits(config, rounded, other), reference_logits(config, swapped, IDS)):
        assert relative_error(wrong, exact) > bound


def test_low_rank_keys() -> None:
    keys = normal(90, 24)
    u, s, vh = torch.linalg.svd(keys.double(), full_matrices=False)
    for rank in (10, 24):
        basis = _leading_eigenvectors(in_order(keys.T[:, None] * keys.T).double(), rank)
        want = (u[:, :rank] * s[:rank]) @ vh[:rank]
        assert_within(keys @ basis @ basis.T, want, low_rank_error(keys, rank))
        with pytest.raises(AssertionError, match="differs by up to"):
            assert_within(keys @ basis[:, 1:] @ basis[:, 1:].T, want, low_rank_error(keys, rank))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes(dtype: torch.dtype) -> None:
    """A score moves as little as the bound says when a code turns, and more when the key is another."""
    key, query = normal(16), normal(16, seed=1).sign()
    if dtype == torch.int8:
        scale = key.abs().max() / 127
        codes = (key / scale).round().to(dtype)
        turned = codes + torch.eye(16).to(dtype)[5]
    else:
        scale = key.abs().max() / 448
        codes = (key / scale).to(dtype)
        turned = (codes.view(torch.uint8) + torch.eye(16)[5].to(torch.uint8)).view(dtype)
    assert codes_apart(codes, turned).tolist() == torch.eye(16)[5].tolist()
    assert codes_apart(codes, codes[torch.arange(15, -1, -1)]).max() > 1
    largest = float(query.norm() * key.norm())
    moved = float((query * (turned.float() - codes.float()) * scale).sum().abs()) / largest
    assert 0 < moved <= turned_code_error(dtype, 16)
    assert float((query * (key.flip(0) - key)).sum().abs()) / largest > turned_code_error(dtype, 16)
