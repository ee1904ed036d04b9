"""The residual stream in another basis: an orthogonal one, in which every family's model is the same function."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvforge.compiler.convert import ROPE_TABLES
from kvforge.compiler.options import BuildOptions
from kvforge.compiler.stream_basis import StreamBasis, can_change, rotate
from model_defs import families
from tests.support.models.checkpoints import ALL_FAMILIES, keeps_states, make_checkpoint
from tests.support.rounding import config_of
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import EagerSession, eager_session

WITH_NORMS_BEHIND = {"exaone4", "gemma3_text", "gemma4_text", "glm4", "olmo2", "olmo3"}
"""Families whose branches end in a norm, or whose layers have inputs of their own."""
OPTIONS = BuildOptions(dtype="float32", page_size=8, max_num_tokens=64)
ROUNDING = 2e-5
"""Of float32, in a product of thousands of numbers or in some hundred after one another."""
OF_STATES = 1e-3
"""The same where states of linear attention carry rounding from token to token, and norms of short queries and keys
multiply it: such logits of these models in float32, transformers' too, are up to 5e-5 from those in float64, and up to
3e-4 from each other above a cut. In a wrong basis they are others altogether."""
SPREAD = 1.5
"""Beside numbers of one size: cos + sin is at most the root of 2."""


@pytest.mark.parametrize("size", [1, 2, 3, 9, 45, 64, 96, 576, 1536, 2880, 4096])
def test_the_basis_is_orthogonal_and_spreads_an_outlier(size: int) -> None:
    basis = rotate(torch.eye(size))
    torch.testing.assert_close(basis @ basis.T, torch.eye(size), rtol=0, atol=ROUNDING)
    assert float(basis.abs().max() * size**0.5) < SPREAD


def changed(session: EagerSession) -> dict[str, Tensor]:
    """The weights of a session in the other basis; experts one by one."""
    weights = dict(session._weights)
    basis = StreamBasis(session.config, lambda spec: weights[spec.name])
    found = {}
    for name, tensor in weights.items():
        change = None if name in ROPE_TABLES else basis.change(name)
        stacked = ".experts." in name and (tensor.dim() == 3 or (name.endswith("_bias") and tensor.dim() == 2))
        if change is None:
            found[name] = tensor
        else:
            found[name] = torch.stack([change(one) for one in tensor]) if stacked else change(tensor)
    return found


def logits(session: EagerSession) -> Tensor:
    tokens = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(3))
    return StepDriver(session, seed=0).run(tokens.tolist())


def is_gain(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 1 and "norm" in name


@pytest.mark.parametrize("form", ["no cut", "cut", "cut, early exit"])
@pytest.mark.parametrize("family", sorted(ALL_FAMILIES))
def test_a_model_is_the_same_in_the_basis(family: str, form: str, tmp_path: Path) -> None:
    if form != "no cut" and not families()[family].is_rewired:
        pytest.skip("the family has no SwiftKV form")
    if form == "cut, early exit" and keeps_states(family):
        pytest.skip("models with linear attention have no early exit")
    cut = {} if form == "no cut" else {"cut": 1, "group_size": 2, "early_exit": form == "cut, early exit"}
    path = make_checkpoint(tmp_path / "c", family, tie_word_embeddings=False, **cut)
    assert can_change(config_of(path)) == (family not in WITH_NORMS_BEHIND)
    if family in WITH_NORMS_BEHIND:
        return
    plain = eager_session(path, OPTIONS)
    weights = changed(plain)
    moved = {name: tensor for name, tensor in weights.items() if not torch.equal(tensor, plain._weights[name])}
    assert {"embed.weight", "lm_head.weight", "layers.0.o.weight"} <= set(moved)
    assert all(bool((tensor == 1).all()) for name, tensor in moved.items() if is_gain(name, tensor))
    other = EagerSession(plain.config, plain.options, weights, None)
    expected, found = logits(plain), logits(other)
    bound = ROUNDING if plain.config.linear is None else OF_STATES
    assert float((found - expected).abs().max() / expected.std()) < bound
