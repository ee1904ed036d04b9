"""Reading ModelOpt's Hugging Face exports: both places of its configuration, FP8 weights, scales of the cache."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint import Quantization, kv_scales, open_checkpoint
from kvforge.common.errors import CheckpointError
from model_defs import load_config
from tests.support.models.checkpoints import make_checkpoint

DOWN = "model.layers.1.mlp.down_proj.weight"
OLD = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": {"quant_algo": "FP8"}}
FP8_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


def edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def write_old_form(path: Path, **quantization: Any) -> None:
    content = OLD | {"quantization": OLD["quantization"] | quantization}
    (path / "hf_quant_config.json").write_text(json.dumps(content))


def quantize_by_hand(path: Path, kv: dict[str, float] | None = None, rows: bool = False) -> dict[str, torch.Tensor]:
    """Replace every projection by e4m3 and its scale; returns the values a reader must see, in fp32."""
    seen, stored = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stored[name] = seen[name] = tensor
        if "proj" in name and name.endswith("weight"):
            scale = tensor.float().abs().amax(1) / 448 if rows else tensor.float().abs().max() / 448
            column = scale.view(-1, 1)
            stored[name] = (tensor.float() / column).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
            seen[name] = stored[name].float() * column
    stored |= {name: torch.tensor(value) for name, value in (kv or {}).items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return seen


def all_scales(layers: list[int], suffix_from: int) -> dict[str, float]:
    return {
        f"model.layers.{layer}.self_attn.{part}_proj{'_swiftkv' if layer >= suffix_from else ''}.{part}_scale": value
        for layer in layers
        for part, value in (("k", 0.01 * (layer + 1)), ("v", 0.02 * (layer + 1)))
    }


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [False, True], ids=["per tensor", "per row"])
def test_old_form_weights_are_read_as_stored_times_scale(rows: bool, plain: Path) -> None:
    seen = quantize_by_hand(plain, rows=rows)
    write_old_form(plain, quant_algo="FP8_PER_CHANNEL_PER_TOKEN" if rows else "FP8")
    checkpoint = open_checkpoint(plain)
    assert checkpoint.quantization == Quantization("FP8_PER_CHANNEL_PER_TOKEN" if rows else "FP8", None)
    for name, expected in seen.items():
        torch.testing.assert_close(checkpoint.read(name, tuple(expected.shape)), expected, rtol=0, atol=0)
    assert kv_scales(checkpoint, load_config(checkpoint.hf_config)) == ()


@pytest.mark.parametrize(
    "embedded",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": FP8_SCHEME},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": "FP8"},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
    ],
    ids=["scheme", "scheme by name", "nested"],
)
def test_new_form_in_config_json(embedded: dict[str, Any], plain: Path) -> None:
    quantize_by_hand(plain, all_scales([0, 1, 2, 3], 4))
    edit_config(plain, quantization_config=embedded)
    checkpoint = open_checkpoint(plain)
    assert checkpoint.quantization == Quantization("FP8", "FP8")
    scales = kv_scales(checkpoint, load_config(checkpoint.hf_config))
    assert scales == tuple((pytest.approx(0.01 * n), pytest.approx(0.02 * n)) for n in (1, 2, 3, 4))


def test_scales_of_a_swiftkv_model_belong_to_owners(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "cut", "llama", cut=2, group_size=2, num_hidden_layers=5)
    quantize_by_hand(path, all_scales([0, 1, 2, 4], 2))
    write_old_form(path, kv_cache_quant_algo="FP8")
    checkpoint = open_checkpoint(path)
    config = load_config(checkpoint.hf_config)
    assert config.owners == (0, 1, 2, 4)
    scales = kv_scales(checkpoint, config)
    assert [k for k, _ in scales] == pytest.approx([0.01, 0.02, 0.03, 0.05])
    ratios = [new / old for new, old in zip(kv_scales(checkpoint, config, "int8_static")[3], scales[3], strict=True)]
    assert ratios == pytest.approx([448 / 127, 448 / 127])


def test_constant_amax_leaves_no_scales_and_means_one(plain: Path) -> None:
    write_old_form(plain, quant_algo=None, kv_cache_quant_algo="FP8")
    checkpoint = open_checkpoint(plain)
    assert kv_scales(checkpoint, load_config(checkpoint.hf_config)) == ((1.0, 1.0),) * 4


@pytest.mark.parametrize(
    ("algorithm", "kv_dtype"), [("FP8", "int8_static"), ("INT8", "int8_static"), ("INT8", "fp8_static")]
)
def test_no_scales_mean_nothing_for_int8(algorithm: str, kv_dtype: str, plain: Path) -> None:
    write_old_form(plain, quant_algo=None, kv_cache_quant_algo=algorithm)
    checkpoint = open_checkpoint(plain)
    with pytest.raises(CheckpointError, match="has no KV scales, which only ModelOpt's FP8 cache can do without"):
        kv_scales(checkpoint, load_config(checkpoint.hf_config), kv_dtype)


@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.kv_scale", "self_attn.k_proj.output_scale"])
def test_scales_under_other_names_are_not_taken_for_none(name: str, plain: Path) -> None:
    quantize_by_hand(plain, {f"model.layers.{layer}.{name}": 0.1 for layer in range(4)})
    write_old_form(plain, kv_cache_quant_algo="FP8")
    checkpoint = open_checkpoint(plain)
    with pytest.raises(CheckpointError, match=rf"has model.layers.\d.{name}, but none of the scales"):
        kv_scales(checkpoint, load_config(checkpoint.hf_config))


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A8_AWQ", "W4A16_AWQ", "INT4_AWQ", "FP8_PB_WO", "MIXED_PRECISION"])
def test_other_weight_algorithms_are_refused_by_name(algorithm: str, plain: Path) -> None:
    write_old_form(plain, quant_algo=algorithm)
    with pytest.raises(CheckpointError, match=f"quantizes the weights by '{algorithm}'; supported are FP8"):
        open_checkpoint(plain)


@pytest.mark.parametrize(
    ("embedded", "message"),
    [
        ({"quant_method": "bitsandbytes", "bits": 4}, "quant_method 'bitsandbytes'"),
        ("fp8", "quant_method 'fp8'"),
    ],
)
def test_other_formats_are_refused_by_name(embedded: Any, message: str, plain: Path) -> None:
    edit_config(plain, quantization_config=embedded)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(plain)


def test_two_descriptions_complete_each_other_but_must_not_differ(plain: Path) -> None:
    write_old_form(plain)
    edit_config(plain, quantization_config={"quant_method": "modelopt", "kv_cache_scheme": FP8_SCHEME})
    assert open_checkpoint(plain).quantization == Quantization("FP8", "FP8")
    write_old_form(plain, kv_cache_quant_algo="INT8")
    with pytest.raises(CheckpointError, match=r"by config.json and as .* by hf_quant_config.json"):
        open_checkpoint(plain)


@pytest.mark.parametrize(
    ("embedded", "message"),
    [
        ({"kv_cache_quant_algo": "INT8", "kv_cache_scheme": FP8_SCHEME}, "INT8 by config.json and .* FP8 by kv"),
        ({"quant_algo": "NVFP4", "quantization": {"quant_algo": "FP8"}}, "quantizes the weights by 'NVFP4'"),
        ({"kv_cache_scheme": FP8_SCHEME, "quantization": {"kv_cache_quant_algo": "INT8"}}, "INT8 by config.json;"),
        ({"quantization": []}, "no object 'quantization'"),
    ],
)
def test_config_json_must_not_contradict_itself(embedded: dict[str, Any], message: str, plain: Path) -> None:
    edit_config(plain, quantization_config={"quant_method": "modelopt"} | embedded)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(plain)


def test_a_description_nested_without_end_is_damage(plain: Path) -> None:
    (plain / "hf_quant_config.json").write_text('{"quantization": ' + "[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        open_checkpoint(plain)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda w: w.pop(f"{DOWN}_scale"), f"no {DOWN}_scale"),
        (lambda w: w.update({f"{DOWN}_scale": torch.tensor(math.nan)}), f"{DOWN}_scale .* positive number"),
        (lambda w: w.update({f"{DOWN}_scale": torch.ones(3)}), f"{DOWN}_scale .* positive number"),
        (lambda w: w.update({f"{DOWN}_scale": torch.tensor(3e38)}), f"{DOWN}_scale .* positive number"),
    ],
    ids=["missing", "nan", "wrong size", "overflow"],
)
def test_a_bad_weight_scale_is_named(broken: Any, message: str, plain: Path) -> None:
    quantize_by_hand(plain)
    write_old_form(plain)
    weights = load_file(plain / "model.safetensors")
    broken(weights)
    save_file(weights, plain / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(plain).read(DOWN, (64, 96))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"model.layers.3.self_attn.v_proj.v_scale": None}, "v_scale is missing from .* has 7 of 8 KV scales"),
        ({"model.layers.0.self_attn.k_proj.k_scale": 0.0}, "must be one positive number"),
        ({"model.layers.0.self_attn.k_proj.k_scale": 1e-40}, "must be one positive number"),
        ({"model.layers.0.self_attn.k_proj.k_bias": 1.0}, "affine"),
    ],
)
def test_bad_kv_scales_are_named(extra: dict[str, float | None], message: str, plain: Path) -> None:
    given = all_scales([0, 1, 2, 3], 4) | extra
    quantize_by_hand(plain, {name: value for name, value in given.items() if value is not None})
    write_old_form(plain, kv_cache_quant_algo="FP8")
    checkpoint = open_checkpoint(plain)
    with pytest.raises(CheckpointError, match=message):
        kv_scales(checkpoint, load_config(checkpoint.hf_config))


def test_a_scale_that_int8_cannot_hold_is_named(plain: Path) -> None:
    quantize_by_hand(plain, all_scales([0, 1, 2, 3], 4) | {"model.layers.0.self_attn.k_proj.k_scale": 3e38})
    write_old_form(plain, kv_cache_quant_algo="FP8")
    checkpoint = open_checkpoint(plain)
    config = load_config(checkpoint.hf_config)
    assert kv_scales(checkpoint, config)[0][0] == pytest.approx(3e38)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.k_scale .* positive number"):
        kv_scales(checkpoint, config, "int8_static")


def test_fp8_weights_that_nothing_describes_are_refused(plain: Path) -> None:
    quantize_by_hand(plain)
    with pytest.raises(CheckpointError, match="dtype F8_E4M3"):
        open_checkpoint(plain).check(DOWN, (64, 96))


def test_the_hash_covers_the_description(plain: Path) -> None:
    before = open_checkpoint(plain).sha256()
    write_old_form(plain, kv_cache_quant_algo="FP8")
    assert open_checkpoint(plain).sha256() != before
