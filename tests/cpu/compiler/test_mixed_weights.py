"""Weights in 4 bits of which some layers are int8, up to a bound of bits a weight."""

import dataclasses
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.cli import main
from kvforge.common.errors import BuildError, EngineError
from kvforge.compiler import build_engine
from kvforge.compiler.calibration import PACKAGE, Calibration, calibration_of
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.cpu_graph import dtype_of_packed, linears
from kvforge.compiler.mixed_weights import most_valuable
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.costs.weights import bytes_more_as_int8, step_weight_bytes, step_weights, weight_bits
from kvforge.manifest import load_manifest, save_manifest
from kvforge.planning.presets import PRESETS
from kvforge.quantize import quantize_checkpoint
from tests.support.models.checkpoints import ALL_FAMILIES, make_checkpoint
from tests.support.random_cases import Seeds

ROUNDED_BYTES = 1
"""Bytes are whole numbers, of bits that may not be."""
A_TOKEN_OF_ALL = 1e-4
"""The cache has room for whole tokens, 10,000 and more."""

SAMPLES = [list(range(3, 60)), list(range(100, 140))]


def test_the_most_valuable_fill_the_room(seeds: Seeds) -> None:
    """Never more than there is room for; none that is left out would fit, and each is worth more a byte than all behind
    it that were left out while it fitted. Of equal sizes they are the best choice of all."""
    for seed in seeds(20, 200):
        rng = random.Random(seed)
        is_equal, count = seed % 2 == 0, rng.randint(1, 9)
        sizes = {str(i): 7 if is_equal else rng.randint(1, 9) for i in range(count)}
        losses = {name: rng.random() for name in sizes}
        room = rng.uniform(0, sum(sizes.values()) + 2)
        chosen = most_valuable(losses, sizes, room)
        taken = sum(sizes[name] for name in chosen)
        assert taken <= room and all(taken + sizes[name] > room for name in set(sizes) - chosen)
        if is_equal:
            choices = itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in range(count + 1))
            fitting = [sum(losses[n] for n in names) for names in choices if 7 * len(names) <= room]
            assert sum(losses[name] for name in chosen) == pytest.approx(max(fitting))


def test_without_loss_or_room_nothing_is_int8() -> None:
    assert most_valuable({}, {}, 5.0) == set()
    assert most_valuable({"a": 1.0}, {"a": 8}, 7.9) == set()
    assert most_valuable({"a": 0.0, "b": 1.0}, {"a": 8, "b": 0}, 0.0) == {"b"}


@pytest.mark.parametrize("weights", ["int4", "int4_zeros"])
def test_bytes_are_those_of_the_tensors(weights: str, tmp_path: Path, seeds: Seeds) -> None:
    """Of families of all kinds, and never above the bound; a higher one leaves fewer layers in 4 bits."""
    families = sorted(ALL_FAMILIES)
    for index in seeds(3, len(families)):
        folder = tmp_path / families[index]
        path = make_checkpoint(folder / "c", families[index], tie_word_embeddings=True, num_hidden_layers=2)
        check_bytes(path, weights, folder)


def check_bytes(path: Path, weights: str, folder: Path) -> None:
    checkpoint = open_model(path)
    config = read_model_config(checkpoint).for_length(64)
    options = resolve(BuildOptions(page_size=8, max_seq_len=64, weight_dtype=weights), config, "F32")
    dtype = options.packed_dtype
    quantized = {n for n, x in linears(config).items() if not dtype_of_packed(x, dtype).is_floating_point}
    least, more = step_weight_bytes(config, weights), bytes_more_as_int8(config, weights, quantized)
    counts = []
    for share in (0.4, 0.95):
        bits = weight_bits(config, least + share * more)
        mixed = Calibration(SAMPLES, PACKAGE).mix(checkpoint, config, options, bits)
        assert set(mixed.int8_layers) < quantized
        added = bytes_more_as_int8(config, weights, mixed.int8_layers)
        assert 0 < added <= share * more + 1
        counts.append(added)
        files = folder / "mixed.safetensors", folder / "plain.safetensors"
        for file, names in zip(files, (mixed.int8_layers, ()), strict=True):
            convert_weights(checkpoint, config, torch.bfloat16, file, packed_dtype=dtype, int8_layers=names)
        found, plain = ({name: x for name, x in load_file(file).items() if name.endswith(".packed")} for file in files)
        int8 = {name.removesuffix(".packed") for name, tensor in found.items() if tensor.dtype == torch.int8}
        assert int8 == set(mixed.int8_layers)
        assert sum(x.nbytes for x in found.values()) - sum(x.nbytes for x in plain.values()) == added
    assert counts[0] < counts[1]


def test_a_mixed_engine_is_built_and_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its layers are rounded by the text, each to its format."""
    path = make_checkpoint(tmp_path / "c", num_hidden_layers=2, dtype=torch.bfloat16)
    options = BuildOptions(weight_dtype="int4", weight_bits=6.5, page_size=8, max_seq_len=64)
    manifest = build_engine(path, tmp_path / "e", options)
    assert manifest.calibration == PACKAGE and len(manifest.int8_layers) > 0
    assert 5.5 < manifest.weight_bits <= 6.5
    assert main(["inspect", str(tmp_path / "e")]) == 0
    told = f"{len(manifest.int8_layers)} of them int8, {manifest.weight_bits:.2f} bits a weight"
    assert told in capsys.readouterr().out
    assert main(["plan", "--model", str(tmp_path / "e")]) == 0
    assert f"int4 weights, {manifest.weight_bits:.2f} bits each" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "e"), "--prompt", "the", "--max-tokens", "3", "--ignore-eos"]) == 0
    for wrong in ({"int8_layers": ("layers.7.qkv",)}, {"weight_dtype": "int8"}):
        save_manifest(dataclasses.replace(manifest, **wrong), tmp_path / "e")
        with pytest.raises(EngineError, match="rebuild the engine"):
            load_manifest(tmp_path / "e")


def test_a_plan_counts_the_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """All that stays of a memory is the cache's, so the tokens that fit say what the weights take."""

    def planned(*more: str) -> dict:
        arguments = ["--model", "llama-3.1-8b", "--weight-dtype", "int4", "--memory-gib", "24", "--json"]
        assert main(["plan", *arguments, *more]) == 0
        return json.loads(capsys.readouterr().out)

    plain, mixed = planned(), planned("--weight-bits", "6")
    assert plain["weight_bits"] < 4.5 and mixed["weight_bits"] == 6
    row, other = plain["variants"][0], mixed["variants"][0]
    added = (6 - plain["weight_bits"]) / 8 * step_weights(PRESETS["llama-3.1-8b"].model)
    assert other["weight_bytes"] - row["weight_bytes"] == pytest.approx(added, abs=ROUNDED_BYTES)
    tokens = [found["capacity"][0]["variants"][0]["cache_tokens"] for found in (plain, mixed)]
    assert (tokens[0] - tokens[1]) * row["kv_bytes_per_token"] == pytest.approx(added, rel=A_TOKEN_OF_ALL)
    for arguments, words in (
        (("--weight-dtype", "int4", "--weight-bits", "4.1"), "is 4.1, and int4 weights of llama-3.1-8b have 4.2"),
        (("--weight-dtype", "int4", "--weight-bits", "8"), "and less than 8."),
        (("--weight-bits", "6"), "llama-3.1-8b has bfloat16 weights; give --weight-dtype int4 or"),
    ):
        assert main(["plan", "--model", "llama-3.1-8b", *arguments]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight_dtype": "int8", "weight_bits": 6.0}, "for --weight-dtype int4 or .*, not int8; give one of these"),
        ({"weight_bits": 6.0}, "for --weight-dtype int4 or .*, not auto"),
        ({"weight_dtype": "int4", "weight_bits": 4.0}, "is 4; it must be more than 4 and less than 8"),
        ({"weight_dtype": "int4", "weight_bits": 8.0}, "is 8; it must be more than 4"),
        ({"weight_dtype": "int4", "weight_bits": float("nan")}, "is nan; it must be more than 4"),
        ({"weight_dtype": "int4", "weight_bits": 6.0, "calibration": "none"}, "leave --calibration none out"),
        ({"weight_dtype": "int4", "weight_bits": 4.01}, r"is 4.01, and int4 weights of this model have \d.\d\d bits"),
    ],
)
def test_what_cannot_be_mixed_is_refused(given: dict, message: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", num_hidden_layers=1, dtype=torch.bfloat16)
    with pytest.raises(BuildError, match=message):
        build_engine(path, tmp_path / "e", BuildOptions(page_size=8, **given))
    assert not (tmp_path / "e").exists()


def test_weights_in_4_bits_already_are_not_mixed(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", num_hidden_layers=1, dtype=torch.bfloat16)
    quantize_checkpoint(path, tmp_path / "int4", "int4", num_samples=2, num_tokens=400)
    checkpoint, options = open_model(tmp_path / "int4"), BuildOptions(weight_dtype="int4", weight_bits=6.0, page_size=8)
    config = read_model_config(checkpoint)
    with pytest.raises(BuildError, match=r"has weights in 4 bits already.*leave --weight-bits out"):
        calibration_of(options, resolve(options, config, "BF16"), config, checkpoint)
