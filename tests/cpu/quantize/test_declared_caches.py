"""What checkpoints of ModelOpt and compressed-tensors say of the KV cache, as these libraries wrote it.

``data/kv_caches.json`` holds the descriptions that ModelOpt 0.47.0 (``export_hf_checkpoint`` after ``NVFP4_KV_CFG`` and
``NVFP4_AFFINE_KV_CFG``) and compressed-tensors 0.20.0 (``apply_quantization_config`` with a ``kv_cache_scheme`` alone,
``ModelCompressor.update_config``) made of a Llama of two layers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint import Checkpoint, kv_scales, open_checkpoint
from kvforge.checkpoint.model import check_weights
from kvforge.common.errors import BuildError, CheckpointError
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from kvforge.planning.load import load_subject
from model_defs import load_config
from tests.support.models.checkpoints import make_checkpoint

CACHES = json.loads((Path(__file__).parent / "data" / "kv_caches.json").read_text())
COMPRESSED = CACHES["compressed-tensors"]["config.json"]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16)


def describe(path: Path, embedded: dict[str, Any] | None, beside: dict[str, Any] | None = None) -> None:
    config = json.loads((path / "config.json").read_text())
    if embedded is not None:
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": embedded}))
    if beside is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(beside))


def add_scales(path: Path, layers: int = 4, ending: str = "self_attn.{}_scale") -> None:
    """Scales as compressed-tensors keeps them, 2^-6 and 2^-5 of the first layer."""
    weights = load_file(path / "model.safetensors")
    for layer in range(layers):
        for part, value in (("k", 1 / 64), ("v", 1 / 32)):
            name = f"model.layers.{layer}.{ending.format(part)}"
            weights[name] = torch.tensor([value * (layer + 1)], dtype=torch.bfloat16)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def resolved(checkpoint: Checkpoint, kv_dtype: str) -> ResolvedOptions:
    algorithm = checkpoint.quantization.kv_cache_algo if checkpoint.quantization else None
    return resolve(BuildOptions(kv_dtype=kv_dtype), load_config(checkpoint.hf_config), "BF16", algorithm)


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json", "both"])
@pytest.mark.parametrize("name", ["NVFP4", "NVFP4_AFFINE"])
def test_a_cache_that_no_engine_has_is_left_out_for_one_that_is_asked_for(name: str, place: str, plain: Path) -> None:
    written = {key: value for key, value in CACHES[name].items() if place in (key, "both")}
    describe(plain, written.get("config.json"), written.get("hf_quant_config.json"))
    checkpoint = open_checkpoint(plain)
    assert str(checkpoint.quantization) == f"weights unquantized, KV cache {name}"
    with pytest.raises(BuildError, match=f"quantizes the KV cache by {name}, which .* give --kv-dtype bfloat16, int4"):
        resolved(checkpoint, "auto")
    for kv_dtype in ("int4", "bfloat16", "fp8"):
        assert resolved(checkpoint, kv_dtype).kv_dtype == kv_dtype
    with pytest.raises(BuildError, match="fp8_static needs a checkpoint that was calibrated for an 8-bit cache"):
        resolved(checkpoint, "fp8_static")
    assert kv_scales(checkpoint, load_config(checkpoint.hf_config)) == ()
    assert load_subject(str(plain)).kv_dtype == "bfloat16"


@pytest.mark.parametrize(("kind", "largest"), [("float", 448), ("int", 127)])
def test_compressed_tensors_scales_are_those_of_a_static_cache(kind: str, largest: int, plain: Path) -> None:
    describe(plain, COMPRESSED | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"] | {"type": kind}})
    add_scales(plain)
    checkpoint = open_checkpoint(plain)
    config = load_config(checkpoint.hf_config)
    check_weights(checkpoint, config)
    kv_dtype = resolved(checkpoint, "auto").kv_dtype
    assert kv_dtype == ("fp8_static" if kind == "float" else "int8_static") == load_subject(str(plain)).kv_dtype
    scales = kv_scales(checkpoint, config, kv_dtype)
    assert scales == tuple((n / 64, n / 32) for n in (1, 2, 3, 4))
    assert kv_scales(checkpoint, config, "int8_static")[0][0] == pytest.approx(largest / 127 / 64)
    assert resolved(checkpoint, "int4").kv_dtype == "int4"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_bits": 4}, "num_bits 4, type 'float'"),
        ({"dynamic": True}, "dynamic True"),
        ({"strategy": "attn_head"}, "strategy 'attn_head'"),
        ({"symmetric": False}, "symmetric False"),
    ],
)
def test_other_schemes_are_named_and_left_out_for_what_is_asked_for(
    change: dict[str, Any], told: str, plain: Path
) -> None:
    describe(plain, COMPRESSED | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"] | change})
    checkpoint = open_checkpoint(plain)
    with pytest.raises(BuildError, match=f"{told}.*which no engine has"):
        resolved(checkpoint, "auto")
    assert resolved(checkpoint, "int8").kv_dtype == "int8"


def test_missing_scales_of_compressed_tensors_are_not_taken_for_one(plain: Path) -> None:
    describe(plain, COMPRESSED)
    config = load_config(open_checkpoint(plain).hf_config)
    with pytest.raises(CheckpointError, match="has no KV scales, which only ModelOpt's FP8 cache can do without"):
        kv_scales(open_checkpoint(plain), config)
    add_scales(plain, ending="self_attn.{0}_proj.{0}_scale")
    with pytest.raises(CheckpointError, match="but none of the scales that its library's export would name"):
        kv_scales(open_checkpoint(plain), config)


def test_nothing_quantized_but_the_cache_needs_a_scheme(plain: Path) -> None:
    describe(plain, COMPRESSED | {"kv_cache_scheme": None})
    with pytest.raises(CheckpointError, match="says config_groups"):
        open_checkpoint(plain)
