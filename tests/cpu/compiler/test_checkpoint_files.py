"""Which files of a checkpoint are read, and what of them reaches the engine."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvforge.checkpoint import layouts, open_checkpoint
from kvforge.common.errors import CheckpointError
from kvforge.compiler import build_engine
from kvforge.compiler.targets import cpu


def test_model_safetensors_wins_over_a_left_behind_index(checkpoint: Path) -> None:
    """As in transformers: a stale index or a second format beside it is not read."""
    save_file({"model.norm.weight": torch.zeros(16)}, checkpoint / "old.safetensors")
    index = {"weight_map": {"model.norm.weight": "old.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "consolidated.safetensors")
    opened = open_checkpoint(checkpoint)
    assert set(opened.file_of_tensor.values()) == {checkpoint / "model.safetensors"}
    assert opened.read("model.norm.weight", (16,)).abs().sum() > 0


def test_one_tensor_in_two_files_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    shutil.copy(checkpoint / "a.safetensors", checkpoint / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"is in both a\.safetensors and b\.safetensors"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 5}, ["a"]])
def test_an_index_without_a_map_is_refused(weight_map: object, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map"):
        open_checkpoint(checkpoint)


def test_a_bias_the_configuration_does_not_ask_for_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Leaving it out would build another model without a word, unless it is of zeros."""
    weights = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file(weights | {name: torch.ones(16)}, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        build_engine(checkpoint, tmp_path / "engine")


def test_a_damaged_tokenizer_is_refused_before_the_build(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    stages: list[str] = []
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        build_engine(checkpoint, tmp_path / "engine", progress=stages.append)
    assert stages == ["read"] and not (tmp_path / "engine").exists()


def test_the_engine_ends_texts_at_the_eos_ids_of_both_files(checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    write = contextlib.nullcontext(lambda program, path: path.write_bytes(b""))
    monkeypatch.setattr(cpu, "package_writer", lambda: write)
    monkeypatch.setattr(cpu, "build_library", lambda path: path.write_bytes(b""))
    assert build_engine(checkpoint, tmp_path / "engine").eos_token_ids == (2, 9)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer_is_named(name: str, checkpoint: Path, tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 10305832\n"
    (checkpoint / name).write_text(pointer)
    with pytest.raises(
        CheckpointError, match=rf"{name} is a Git LFS pointer and not the file itself; run git lfs pull"
    ):
        build_engine(checkpoint, tmp_path / "engine")


def test_an_unsupported_family_is_said_before_missing_weights(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert the checkpoint to safetensors"):
        build_engine(checkpoint, tmp_path / "engine")
    (checkpoint / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match=r"model_type 'gpt2' is not supported; supported are "):
        build_engine(checkpoint, tmp_path / "engine")


def test_a_files_layouts_are_read_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a file costs time for each of its tensors: of thousands, that of asking for each would be squared."""
    opened: list[Path] = []

    def counted(file: Path, **options: Any) -> Any:
        opened.append(file)
        return safe_open(file, **options)

    monkeypatch.setattr(layouts, "safe_open", counted)
    found = open_checkpoint(checkpoint)
    asked = {name: found.renamed(str.upper).layout(name.upper()) for name in found.file_of_tensor}
    assert opened == [checkpoint / "model.safetensors"]
    spelled = {torch.float32: "F32", torch.bfloat16: "BF16"}
    tensors = load_file(checkpoint / "model.safetensors")
    assert asked == {name: (tuple(x.shape), spelled[x.dtype]) for name, x in tensors.items()}
