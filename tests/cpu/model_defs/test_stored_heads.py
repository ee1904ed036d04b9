"""A stored LM head beside tied embeddings: the tensors win, as in transformers, for all who read the checkpoint."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint.head import EMBEDDINGS, HEAD, TIED
from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.cli import main
from kvforge.common.errors import CheckpointError, CheckpointWarning
from kvforge.costs.weights import num_parameters
from kvforge.planning.load import load_subject
from kvforge.quantize.export import _open as open_to_quantize
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.swiftkv import load_model
from model_defs import families
from tests.support.models.checkpoints import ALL_FAMILIES, make_checkpoint
from tests.support.models.logits import logits_of, transformers_logits
from tests.support.rounding import assert_near, model_error

IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(0))


def edited(path: Path, says: bool | None, **tensors: torch.Tensor | None) -> Path:
    """The checkpoint whose config.json says ``says``, with tensors of other values, or without them."""
    hf = json.loads((path / "config.json").read_text())
    hf.pop(TIED, None)
    (path / "config.json").write_text(json.dumps(hf if says is None else hf | {TIED: says}))
    stored = {**load_file(path / "model.safetensors"), **{NAMES[key]: value for key, value in tensors.items()}}
    weights = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


NAMES = {"head": HEAD, "embeddings": EMBEDDINGS}


def untied(path: Path, family: str = "llama", **options: Any) -> Path:
    """A checkpoint with a head of its own whose config.json says that it has none."""
    return edited(make_checkpoint(path, family, tie_word_embeddings=False, **options), True)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_head_with_values_of_its_own_is_used(family: str, tmp_path: Path) -> None:
    path = untied(tmp_path / "c", family)
    assert EMBEDDINGS in map(families()[family].weight_name, load_file(path / "model.safetensors"))
    with pytest.warns(CheckpointWarning, match="the stored head is used"):
        got, config = logits_of(path, IDS)
    assert not config.tie_embeddings
    assert_near(got, transformers_logits(path, IDS), model_error(config, len(IDS)))


def test_an_equal_head_is_tied_without_a_word(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", tie_word_embeddings=True)
    edited(path, True, head=load_file(path / "model.safetensors")[EMBEDDINGS].clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        got, config = logits_of(path, IDS)
    assert config.tie_embeddings
    assert_near(got, transformers_logits(path, IDS), model_error(config, len(IDS)))


def test_one_element_is_enough(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", tie_word_embeddings=True)
    head = load_file(path / "model.safetensors")[EMBEDDINGS].clone()
    head[-1, -1] += 1e-3
    with pytest.warns(CheckpointWarning):
        assert not read_model_config(open_model(edited(path, True, head=head))).tie_embeddings


def test_a_tied_head_may_be_stored_in_place_of_the_embeddings(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", tie_word_embeddings=True)
    edited(path, True, head=load_file(path / "model.safetensors")[EMBEDDINGS].clone(), embeddings=None)
    got, config = logits_of(path, IDS)
    assert_near(got, transformers_logits(path, IDS), model_error(config, len(IDS)))


@pytest.mark.parametrize("says", [False, None])
def test_an_untied_model_without_a_head_is_refused(says: bool | None, tmp_path: Path) -> None:
    """transformers draws a random one."""
    path = edited(make_checkpoint(tmp_path / "c", tie_word_embeddings=True), says)
    with pytest.raises(CheckpointError, match=r"has no lm_head.weight.*tie_word_embeddings"):
        logits_of(path, IDS)


@pytest.mark.filterwarnings("ignore::kvforge.common.errors.CheckpointWarning")
def test_all_who_read_the_checkpoint_agree(tmp_path: Path) -> None:
    path = untied(tmp_path / "c")
    expected = transformers_logits(path, IDS)
    checkpoint, config = open_to_quantize(path)
    assert not config.tie_embeddings
    with torch.no_grad():
        got = load_model(checkpoint, config, torch.float32)(IDS[None])[0]
    assert_near(got, expected, model_error(config, len(IDS)))
    twin = make_checkpoint(tmp_path / "twin", tie_word_embeddings=False)
    models = [load_subject(str(each)).model for each in (path, twin)]
    assert len(set(map(num_parameters, models))) == 1
    rewire_checkpoint(path, tmp_path / "cut", RewireOptions(cut=2, group_size=1, init="fold"))
    assert json.loads((tmp_path / "cut" / "config.json").read_text())[TIED] is False
    assert not read_model_config(open_model(tmp_path / "cut")).tie_embeddings


def test_a_command_notes_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = untied(tmp_path / "c")
    assert main(["rewire", str(path), str(tmp_path / "cut"), "--cut-layer", "2", "--init", "fold"]) == 0
    assert capsys.readouterr().err.count("the stored head is used") == 1
    assert main(["-q", "plan", "--model", str(path)]) == 0
    assert not capsys.readouterr().err
