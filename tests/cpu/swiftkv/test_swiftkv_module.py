"""The differentiable model against the plain reference, transformers, and itself with samples packed together."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvforge.checkpoint.model import open_model
from kvforge.common.errors import CheckpointError
from kvforge.swiftkv import SwiftKVForCausalLM, load_model, make_layout
from model_defs import load_config
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import FAMILIES, load_weights, make_checkpoint
from tests.support.rounding import assert_near, assert_within, linear_bound, model_error

IDS = torch.randint(3, 300, (2, 37), generator=torch.Generator().manual_seed(0))


def load(path: Path, **options) -> SwiftKVForCausalLM:
    checkpoint = open_model(path)
    return load_model(checkpoint, load_config(checkpoint.hf_config), torch.float32, **options)


def with_teacher(path: Path, family: str, cut: int, group_size: int, **options) -> Path:
    """A rewired checkpoint that keeps the teacher's projections, as the public code's do."""
    plain = make_checkpoint(path / "plain", family, **options)
    rewired = make_checkpoint(path / "rewired", family, cut=cut, group_size=group_size, **options)
    merged = {**load_weights(plain), **load_weights(rewired)}
    save_file(merged, rewired / "model.safetensors", metadata={"format": "pt"})
    return rewired


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cut", "group_size"), [(None, 1), (1, 1), (2, 2), (1, 2)])
def test_equals_the_reference(tmp_path: Path, family: str, cut: int | None, group_size: int) -> None:
    extra = {"sliding_window": 9} if family == "mistral" else {}
    path = make_checkpoint(tmp_path / "c", family, cut=cut, group_size=group_size, **extra)
    model, weights = load(path), load_weights(path)
    with torch.no_grad():
        logits = model(IDS)
    for row, ids in zip(logits, IDS, strict=True):
        assert_near(row, reference_logits(model.sizes, weights, ids), model_error(model.sizes, len(ids)))


LAST = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}
WINDOWS = {"llama": {"sliding_window": 9}, "mistral": {"sliding_window": 9}, "qwen2": LAST, "qwen3": LAST}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("windows", [False, True])
def test_teacher_path_is_the_model_before_the_cut(tmp_path: Path, family: str, windows: bool) -> None:
    """Without sliding windows, and with one in all layers (Mistral) or in the last (Qwen); Llama knows none."""
    extra = WINDOWS.get(family, {}) if windows else {}
    path = with_teacher(tmp_path, family, cut=2, group_size=2, **extra)
    model = load(path, with_teacher=True)
    assert any(0 < window < 10 for window in model.sizes.layer_windows) == (bool(extra) and family != "llama")
    with torch.no_grad():
        layout = make_layout(model.sizes, IDS.shape[1])
        hidden = model.model.lower(IDS, layout)
        logits = model.head(model.model.upper(hidden, layout, teacher=True)[0])
        hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
        assert_near(logits, hf(IDS).logits, model_error(model.sizes, IDS.shape[1]))
        student = model(IDS)
        torch.testing.assert_close(student, load(path)(IDS), atol=0, rtol=0)
    assert (student - logits).abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 5])
def test_packed_samples_do_not_see_each_other(tmp_path: Path, window: int | None) -> None:
    extra = {"sliding_window": window}
    model = load(make_checkpoint(tmp_path / "c", "mistral", cut=2, group_size=2, **extra))
    pieces = [IDS[0, :11], IDS[0, 11:12], IDS[1, :20]]
    packed = torch.cat(pieces)[None]
    segments = torch.repeat_interleave(torch.tensor([0, 1, 2]), torch.tensor([11, 1, 20]))[None]
    with torch.no_grad():
        together = model(packed, make_layout(model.sizes, packed.shape[1], segments))[0]
        alone = torch.cat([model(piece[None])[0] for piece in pieces])
    assert_near(together, alone, model_error(model.sizes, packed.shape[1]))


def test_equal_numbers_of_separate_runs_are_separate_samples(tmp_path: Path) -> None:
    config = load_config(json.loads((make_checkpoint(tmp_path / "c") / "config.json").read_text()))
    layout = make_layout(config, 4, torch.tensor([[7, 7, 2, 7]]))
    assert layout.masks[0][0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    cos = layout.rotations[config.rope].cos
    assert cos[0, 2:].eq(1).all() and not cos[0, 1].eq(1).all()


def test_early_exit_head_reads_the_state_entering_the_cut(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", cut=2)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    weights["model.norm_early_exit.weight"] = torch.randn(64, generator=generator)
    weights["lm_head_early_exit.weight"] = torch.randn(320, 64, generator=generator)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps({**json.loads((path / "config.json").read_text()), "early_exit": True})
    )
    model = load(path)
    with torch.no_grad():
        hidden = model.model.lower(IDS, make_layout(model.sizes, IDS.shape[1]))
        scale = (hidden.square().mean(-1, keepdim=True) + model.sizes.rms_norm_eps).rsqrt()
        normed, head = hidden * scale * weights["model.norm_early_exit.weight"], weights["lm_head_early_exit.weight"]
        # The norm sums 64 squares; its root, quotient and two products round once each.
        bound = linear_bound(normed.flatten(0, 1), head, roundings=64 + 4)
        assert_within(model.early_exit_logits(hidden).flatten(0, 1), (normed @ head.T).flatten(0, 1), bound)


def test_missing_teacher_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", cut=2)
    with pytest.raises(CheckpointError, match=r"Tensor model\.layers\.2\.self_attn\.q_proj\.weight is missing"):
        load(path, with_teacher=True)


def test_gradients_reach_the_new_projections_only_through_the_student(tmp_path: Path) -> None:
    model = load(with_teacher(tmp_path, "llama", cut=2, group_size=2), with_teacher=True)
    model(IDS).square().mean().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    upper = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in (2, 3) for part in "qkv"]
    assert without == set(upper)
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.grad is not None)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "c", cut=2, tie_word_embeddings=True))
    assert not hasattr(model, "lm_head")
    untied = SwiftKVForCausalLM(dataclasses.replace(model.sizes, tie_embeddings=False))
    untied.load_state_dict({**model.state_dict(), "lm_head.weight": model.model.embed_tokens.weight})
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), untied(IDS), atol=0, rtol=0)
