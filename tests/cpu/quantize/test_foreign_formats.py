"""Checkpoints as other libraries quantize them: read as those libraries read them, and kept by int4 engines."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvforge.checkpoint import open_checkpoint
from kvforge.checkpoint.formats import FORMATS
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.common.errors import CheckpointError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.cpu_graph import linears
from kvforge.manifest import WEIGHTS_FILE
from kvforge.runtime.llm import LLM
from model_defs.weights import weight_specs
from plugins.packed_linear.int4 import round_to_codes
from plugins.packed_linear.packing import WITH_SCALES, WITH_ZEROS, unpack, unpack_codes
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.foreign_weights import CONFIGS, PARTS, StoredWeight, quantize_checkpoint, stored_weights

KEPT = {
    "w4a16": False, "w4a16 asymmetric": True, "w4a16 channel": False,
    "gptq": False, "gptq asymmetric": True, "awq": True,
}  # fmt: skip
"""The recorded weights whose codes an int4 engine keeps, and whether they have zero points."""


@pytest.mark.parametrize("name", stored_weights())
def test_a_weight_is_read_as_its_library_reads_it(name: str, tmp_path: Path) -> None:
    """The libraries round the product to the dtype of their scales."""
    stored = stored_weights()[name]
    checkpoint = open_checkpoint(stored.write(tmp_path / "checkpoint"))
    found = checkpoint.read("layer.weight", tuple(stored.expected.shape))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.to(stored.expected.dtype), stored.expected, rtol=0, atol=0)
    assert checkpoint.dtype("layer.weight") == "F16"


@pytest.mark.parametrize("name", stored_weights())
def test_codes_of_4_bits_are_kept_where_groups_are_regular(name: str, tmp_path: Path) -> None:
    stored = stored_weights()[name]
    checkpoint = open_checkpoint(stored.write(tmp_path / "checkpoint"))
    codes = checkpoint.codes("layer.weight")
    assert (codes is not None) == checkpoint.has_codes("layer.weight") == (name in KEPT)
    if codes is not None:
        assert (codes.zeros is not None) == checkpoint.has_zero_points("layer.weight") == KEPT[name]
        read = checkpoint.read("layer.weight", codes.shape)
        assert torch.equal(codes.in_groups_of(32).dequantize(), read)


def write_fp8(path: Path, block: list[int] | None) -> dict[str, torch.Tensor]:
    """Store every projection of a checkpoint in e4m3, with a scale for each block or for all; returns what is meant."""
    seen, stored = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stored[name] = seen[name] = tensor
        if "proj" in name and name.endswith("weight"):
            rows, columns = block or tensor.shape
            scales = torch.empty(-(-len(tensor) // rows), -(-tensor.shape[1] // columns))
            stored[name], seen[name] = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(tensor.shape)
            for i, j in itertools.product(*map(range, scales.shape)):
                part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scales[i, j] = tensor[part].float().abs().max() / 448
                stored[name][part] = tensor[part].float() / scales[i, j]
                seen[name][part] = stored[name][part].float() * scales[i, j]
            stored[f"{name}_scale_inv"] = scales if block else scales[0, 0]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    hf = json.loads((path / "config.json").read_text())
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    (path / "config.json").write_text(json.dumps(hf | {"quantization_config": said}))
    return seen


@pytest.mark.parametrize("block", [[128, 128], [24, 40], None])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "mixtral"])
def test_fp8_with_a_scale_for_each_block_is_what_it_stands_for(
    family: str, block: list[int] | None, tmp_path: Path
) -> None:
    """In engines of each kind: numbers times scales in float32, rounded once."""
    path = make_checkpoint(tmp_path / "c", family, num_hidden_layers=2, hidden_size=144, intermediate_size=200)
    plain = shutil.copytree(path, tmp_path / "plain")
    seen = write_fp8(path, block)
    save_file(seen, plain / "model.safetensors", metadata={"format": "pt"})
    config = read_model_config(open_model(path))
    check_weights(open_model(path), config)
    for dtype, packed in ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8)):
        for source in (path, plain):
            convert_weights(open_model(source), config, dtype, source / "engine", packed_dtype=packed)
        assert (path / "engine").read_bytes() == (plain / "engine").read_bytes(), (dtype, packed)


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [("weight_block_size", [128], "null and two"), ("fmt", "e5m2", "e4m3"), ("expert_dtype", "fp4", "fp8")],
)
def test_other_fp8_is_refused(key: str, value: Any, supported: str) -> None:
    with pytest.raises(CheckpointError, match=f"says {key} .*; supported are {supported}"):
        FORMATS["fp8"]("config.json", {key: value})


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("method", CONFIGS)
def test_an_int4_engine_has_the_weights_of_the_checkpoint(method: str, zero_points: bool, tmp_path: Path) -> None:
    """Layers that several tensors are fused into, and gated ones; the head, which is not quantized, is rounded."""
    path = make_checkpoint(tmp_path / "model", dtype=torch.float16, num_hidden_layers=2)
    seen = quantize_checkpoint(path, method, zero_points)
    checkpoint = open_model(path)
    config = read_model_config(checkpoint)
    check_weights(checkpoint, config)
    for name, tensor in seen.items():
        assert torch.equal(checkpoint.read(name, tuple(tensor.shape)), tensor)
    dtype = WITH_ZEROS if zero_points else WITH_SCALES
    convert_weights(checkpoint, config, torch.bfloat16, tmp_path / "weights", packed_dtype=dtype)
    specs, layers = {spec.name: spec for spec in weight_specs(config)}, linears(config)
    with safe_open(tmp_path / "weights", "pt") as file:
        for name, layer in layers.items():
            spec = specs[f"{name}.weight"]
            outputs, depth = spec.shape
            codes = unpack_codes(file.get_tensor(f"{name}.packed"), outputs, depth, layer.gated)
            factors = unpack(file.get_tensor(f"{name}.scales").view(-1, 1, 64, 1), outputs, 1, layer.gated)
            want = torch.cat([seen[source.name] for source in spec.sources])
            is_stored = "proj" in spec.sources[0].name
            assert torch.equal(codes.dequantize() * factors, want) == is_stored
    assert any(layer.gated for layer in layers.values())


@pytest.mark.parametrize(
    ("method", "zero_points", "asked", "kept"),
    [("awq", True, "int4_scales", "int4_zeros"), ("gptq", False, "int4", "int4_scales")],
)
def test_an_int4_engine_says_what_its_groups_have(
    method: str, zero_points: bool, asked: str, kept: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Zero points are compiled here; groups with scales alone are elsewhere, and here with --full."""
    if not zero_points:
        request.getfixturevalue("compiled_with_full")
    path = make_checkpoint(tmp_path / "model", dtype=torch.float16, num_hidden_layers=1)
    quantize_checkpoint(path, method, zero_points)
    options = BuildOptions(weight_dtype=asked, max_seq_len=64, max_num_tokens=64, page_size=8)
    manifest = build_engine(path, tmp_path / "engine", options)
    assert (manifest.dtype, manifest.weight_dtype) == ("bfloat16", kept)
    with safe_open(tmp_path / "engine" / WEIGHTS_FILE, "pt") as file:
        read = sum(file.get_tensor(name).nbytes for name in file.keys() if name.endswith(".packed"))  # noqa: SIM118
    assert manifest.weight_bytes == read
    assert len(LLM(tmp_path / "engine").generate("some text")[0].outputs[0].token_ids) > 0


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16"])
def test_plain_weights_under_a_description_of_others_are_refused(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    described = json.loads((stored_weights()[name].write(tmp_path / name) / "config.json").read_text())
    config["quantization_config"] = described["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"has quantization_config of .* and no weight that is stored so; remove"):
        check_weights(checkpoint, read_model_config(checkpoint))


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16"])
def test_the_last_group_may_have_fewer_inputs(name: str, tmp_path: Path) -> None:
    """96 inputs in groups of 64 are 64 and 32, not twice 48."""
    codes = replace(round_to_codes(torch.randn(32, 96)), group_depth=64, scales=torch.rand(32, 2).half().float())
    method = {"w4a16": "compressed-tensors"}.get(name, name)
    parts = {key: part for key, part in PARTS[method](codes).items() if key != "g_idx"}
    config = json.loads(json.dumps(CONFIGS[method]).replace('"group_size": 32', '"group_size": 64'))
    checkpoint = open_checkpoint(StoredWeight(config, parts, codes.dequantize()).write(tmp_path / "checkpoint"))
    assert torch.equal(checkpoint.read("layer.weight", (32, 96)), codes.dequantize())
    kept = checkpoint.codes("layer.weight")
    assert kept is not None and torch.equal(kept.in_groups_of(32).dequantize(), codes.dequantize())


def test_weights_with_a_scale_for_each_output_may_stand_beside_blocks(tmp_path: Path) -> None:
    stored, blocks = (stored_weights()[name] for name in ("fp8 channel", "fp8 block"))
    groups = {name: one.config["config_groups"]["group_0"] for name, one in (("a", stored), ("b", blocks))}
    checkpoint = open_checkpoint(stored.write(tmp_path / "checkpoint", config_groups=groups))
    found = checkpoint.read("layer.weight", tuple(stored.expected.shape))
    assert torch.equal(found.to(stored.expected.dtype), stored.expected)


def test_biases_that_are_not_zero_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", dtype=torch.float16, num_hidden_layers=2)
    quantize_checkpoint(path, "gptq", False)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, path / "model.safetensors")
    checkpoint = open_model(path)
    with pytest.raises(CheckpointError, match=r"has model.layers.0.mlp.up_proj.bias, which config.json does not ask"):
        check_weights(checkpoint, read_model_config(checkpoint))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gptq", {"bits": 3}, "says bits 3; supported are 4 and 8"),
        ("gptq", {"bits": True}, "says bits True; supported are 4 and 8"),
        ("gptq", {"quant_method": ["gptq"]}, r"says quant_method \['gptq'\]; supported are modelopt, awq"),
        ("gptq", {"group_size": 0}, "says group_size 0; supported are -1 and whole numbers above 0"),
        ("awq", {"group_size": "128"}, "says group_size '128'"),
        ("gptq", {"dynamic": [1]}, r"says dynamic \[1\]"),
        ("gptq", {"checkpoint_format": "marlin"}, "says checkpoint_format 'marlin'; supported are gptq and gptq_v2"),
        ("awq", {"bits": 8}, "says bits 8; supported are 4"),
        ("awq", {"version": "gemv"}, "says version 'gemv'; supported are gemm"),
        ("awq", {"zero_point": False}, "says zero_point False"),
        ("w8a8", {"config_groups": {}}, "says config_groups {}"),
        ("w8a8", {"format": ["int-quantized"]}, r"says format \['int-quantized'\]; supported are float-"),
        ("w8a8", {"format": "nvfp4-pack-quantized"}, "says format 'nvfp4-pack-quantized'; supported are float-"),
        ("w8a8", {"sparsity_config": {"format": "sparse-bitmask"}}, "says sparsity_config"),
        ("w4a16", {"transform_config": {"config_groups": {"u": {}}}}, "says transform_config"),
        ("w4a16", {"config_groups": {"group_0": {"weights": {"num_bits": 3}}}}, "weights of 4 and 8 bits"),
        (
            "fp8 block",
            {"config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [8]}}}},
            r"says block_structure \[8\]",
        ),
        (
            "fp8 block",
            {"config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [True, True]}}}},
            r"says block_structure \[True, True\]",
        ),
    ],
)
def test_what_is_not_supported_is_refused(name: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = stored_weights()[name].write(tmp_path / "checkpoint", **config)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("gptq", "scales", r"layer.scales is missing"),
        ("gptq", "qzeros", r"layer.qzeros is missing"),
        ("gptq act order", "g_idx", r"layer.g_idx is missing from .* groups are out of order"),
        ("awq", "scales", r"layer.scales is missing"),
        ("w4a16", "weight_shape", r"layer.weight_shape is missing"),
        ("w4a16", "weight_scale", r"layer.weight_scale is missing"),
        ("w4a16 asymmetric", "weight_zero_point", r"layer.weight_zero_point is missing"),
        ("w8a8", "weight_scale", r"has dtype I8"),
    ],
)
def test_missing_parts_are_named(name: str, part: str, message: str, tmp_path: Path) -> None:
    stored = stored_weights()[name]
    path = stored.write(tmp_path / "checkpoint")
    tensors = {f"layer.{key}": value for key, value in stored.parts.items() if key != part}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path).read("layer.weight", tuple(stored.expected.shape))


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("gptq", "scales", lambda x: x[:, :-8], "parts of layer.weight .* do not fit each other as GPTQ stores them"),
        ("gptq", "scales", lambda x: x / 0, "A scale of layer.weight .* is not finite"),
        ("gptq", "scales", lambda x: x[:0], "do not fit each other"),
        ("gptq", "scales", lambda x: x.flatten(), "must be a matrix of F16, BF16 or F32, not F16 of shape"),
        ("gptq", "scales", lambda x: x.int(), "must be a matrix of F16, BF16 or F32, not I32"),
        ("gptq", "qzeros", lambda x: x[:0], "do not fit each other"),
        ("gptq", "g_idx", lambda x: x + 9, "do not fit each other"),
        ("gptq", "g_idx", lambda x: x[:64], "do not fit each other"),
        ("gptq act order", "g_idx", lambda x: x[:0], "do not fit each other"),
        ("gptq", "qweight", lambda x: x.float(), "layer.qweight .* must be a matrix of I32, not F32"),
        ("awq", "scales", lambda x: torch.cat([x, x[:1]]), "do not fit each other as AWQ stores them"),
        ("awq", "qzeros", lambda x: x[:, :-1], "do not fit each other as AWQ stores them"),
        ("w4a16", "weight_shape", lambda x: x * 3, "which layer.weight_packed of shape .* cannot hold"),
        ("w4a16", "weight_shape", lambda x: x[:1], "cannot hold"),
        ("w4a16", "weight_scale", lambda x: x[:, :1], "do not fit each other"),
        ("w4a16", "weight_packed", lambda x: x.repeat(1, 2), "has not 4 bits a weight"),
        ("w4a16 asymmetric", "weight_zero_point", lambda x: x[:-1], "do not fit each other"),
        ("w4a16 asymmetric", "weight_zero_point", lambda x: x[:1], "do not fit each other"),
        ("fp8 channel", "weight_scale", lambda x: x[:-1], "do not fit each other"),
        ("fp8 channel", "weight_scale", lambda x: x.T, "do not fit each other"),
        ("w8a8", "weight", lambda x: x.int(), "must be a matrix of F8_E4M3 or I8, not I32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(name: str, part: str, change: Any, message: str, tmp_path: Path) -> None:
    stored = stored_weights()[name]
    path = stored.write(tmp_path / "checkpoint")
    tensors = {f"layer.{key}": value for key, value in stored.parts.items()}
    tensors[f"layer.{part}"] = change(tensors[f"layer.{part}"]).contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path).read("layer.weight", tuple(stored.expected.shape))


def test_two_descriptions_are_refused(tmp_path: Path) -> None:
    path = stored_weights()["awq"].write(tmp_path / "checkpoint")
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(CheckpointError, match="are of different libraries"):
        open_checkpoint(path)
