"""Checkpoints that store several projections as one tensor: read part by part, refused where they do not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint import open_checkpoint
from kvforge.checkpoint.fused import split_fused
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.checkpoint.quantization import Quantization
from kvforge.common.errors import CheckpointError
from kvforge.quantize.int4_checkpoint import _config, _parts
from plugins.packed_linear.int4 import round_to_codes
from tests.support.models.checkpoints import load_weights, make_checkpoint

QKV, GATE_UP = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"
Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "phi3", num_hidden_layers=1)


def change(path: Path, **tensors: torch.Tensor) -> None:
    file = path / "model.safetensors"
    weights = load_file(file) | tensors
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, metadata={"format": "pt"})


def test_each_projection_is_its_rows(path: Path) -> None:
    checkpoint, expected = open_model(path), load_weights(path)
    check_weights(checkpoint, read_model_config(checkpoint))
    assert set(checkpoint.file_of_tensor) == set(expected) and QKV not in expected
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read_raw(name), tensor)
        assert torch.equal(checkpoint.read(name, tensor.shape, torch.float32), tensor)
        assert checkpoint.layout(name) == (tuple(tensor.shape), "F32")


def test_projections_stored_one_by_one_are_read_too(path: Path) -> None:
    expected = load_weights(path)
    save_file(expected, path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_model(path)
    assert not checkpoint.parts
    check_weights(checkpoint, read_model_config(checkpoint))


def test_both_at_once_are_refused(path: Path) -> None:
    change(path, **{GATE: load_weights(path)[GATE]})
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight and model.*gate_proj\.weight .* same part"):
        open_model(path)


def test_rows_that_do_not_fit_are_refused(path: Path) -> None:
    change(path, **{QKV: load_file(path / "model.safetensors")[QKV][:-1]})
    checkpoint = open_model(path)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight .* shape \[127, 64\].* asks for 128 rows"):
        check_weights(checkpoint, read_model_config(checkpoint))


def test_scales_of_rows_are_split_with_them(path: Path) -> None:
    """FP8 with a scale for each row, and with one for all."""
    stored = load_file(path / "model.safetensors")
    scales = torch.rand(128) + 0.5
    fp8 = {name: stored[name].to(torch.float8_e4m3fn) for name in (QKV, GATE_UP)}
    change(path, **fp8, **{f"{QKV}_scale": scales, f"{GATE_UP}_scale": torch.tensor(0.5)})
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    checkpoint = open_model(path)
    assert checkpoint.quantization == Quantization("FP8")
    check_weights(checkpoint, read_model_config(checkpoint))
    k = checkpoint.read(Q.replace("q_proj", "k_proj"), (32, 64))
    assert torch.equal(k, (fp8[QKV].float() * scales[:, None])[64:96])
    assert torch.equal(checkpoint.read(GATE.replace("gate", "up"), (96, 64)), fp8[GATE_UP].float()[96:] * 0.5)


def test_a_part_of_codes_is_its_rows(path: Path) -> None:
    """compressed-tensors packs the fused weight; each projection keeps its codes."""
    stored = load_file(path / "model.safetensors")
    codes = {name: round_to_codes(stored[name]) for name in (QKV, GATE_UP)}
    for name, weight in codes.items():
        del stored[name]
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in _parts(weight).items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    hf = json.loads((path / "config.json").read_text()) | {"quantization_config": _config(codes)}
    (path / "config.json").write_text(json.dumps(hf))
    checkpoint = open_model(path)
    check_weights(checkpoint, read_model_config(checkpoint))
    assert checkpoint.has_codes(Q)
    assert torch.equal(checkpoint.codes(Q).codes, codes[QKV].codes[:64])
    up = GATE.replace("gate", "up")
    assert torch.equal(checkpoint.codes(up).codes, codes[GATE_UP].codes[96:])
    assert torch.equal(checkpoint.read(up, (96, 64)), open_checkpoint(path).read(GATE_UP, (192, 64))[96:])


def test_other_modules_are_left_alone(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert split_fused(checkpoint, {"mlp.other": [("mlp.a", 1)]}).file_of_tensor == checkpoint.file_of_tensor
