"""Models in GGUF files: the tensors and logits are those of the Hugging Face checkpoint that they were made of."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvforge.checkpoint.gguf.derived_tensors import GgufPiece
from kvforge.checkpoint.gguf.header import BLOCKS, read_header
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.compiler.convert import convert_weights
from model_defs import families
from model_defs.rope import inverse_frequencies
from model_defs.weights import weight_specs
from plugins.packed_linear.packing import IN_STEPS
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_files import ARCHITECTURES, OWN, write_gguf
from tests.support.models.logits import logits_of, read_weights

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
GAIN = 2**-22
"""Gains are below 2: adding 1 to one and taking it away rounds each time by 2**-24 of a number below 4."""
LOGIT = 2**-10
"""What gains that are off by GAIN do to logits of some units: seventeen norms of rows that the first few amplify by a
thousand at most. A gain that is off by 1, or a norm that is left out, changes them by units."""
FREQUENCY = 2**-22
"""A factor is rounded once, and its product with a period once more; the frequency itself is rounded as before."""

IDS = torch.tensor([1, 70, 33, 259, 300, 7, 7, 111, 254, 40])


def random_model(folder: Path, family: str, **fields: object) -> Path:
    return make_checkpoint(folder / "hf", family, **{**SIZES, **OWN.get(family, {}), **fields})


def test_every_family_with_a_form_is_tested() -> None:
    assert {name for name, family in families().items() if family.gguf is not None} == set(ARCHITECTURES)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_is_the_checkpoint_it_was_made_of(tmp_path: Path, family: str) -> None:
    """Tensor by tensor, and by its logits; gains lose what adding 1 and taking it away rounds."""
    directory, file = random_model(tmp_path, family), tmp_path / "model.gguf"
    write_gguf(directory, file)
    original, found = open_model(directory), open_model(file)
    config, own = read_model_config(found), read_model_config(original)
    check_weights(found, config)
    weights, expected = read_weights(found, config), read_weights(original, own)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        tolerance = GAIN if config.norm_offset and name.endswith("norm.weight") else 0
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance, msg=name)
    logits, plain = logits_of(file, IDS)[0], logits_of(directory, IDS)[0]
    torch.testing.assert_close(logits, plain, rtol=0, atol=LOGIT if config.norm_offset else 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_blocks_are_dequantized_as_the_library_does(tmp_path: Path, family: str, kind: str) -> None:
    """Also where they are experts, and rows of heads that stand in another order."""
    directory, file = random_model(tmp_path, family, moe_intermediate_size=32), tmp_path / "model.gguf"
    read = write_gguf(directory, file, kind)
    checkpoint = open_model(file)
    for name, expected in read.items():
        ours = families()[family].weight_name(name)
        torch.testing.assert_close(checkpoint.read_raw(ours).float(), expected, rtol=0, atol=0, msg=name)
    shape = checkpoint.layout("model.layers.0.self_attn.k_proj.weight")[0]
    some = checkpoint.read("model.layers.0.self_attn.k_proj.weight", shape, torch.float32, rows=(3, 20))
    assert torch.equal(some, read["model.layers.0.self_attn.k_proj.weight"][3:20])


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_format_of_blocks(tmp_path: Path, kind: str) -> None:
    """Random blocks, whose scales are finite as their bytes are small; more than are dequantized at a time."""
    qtype = gguf.GGMLQuantizationType[kind]
    shape = (4200, 512)
    stored = gguf.quants.quant_shape_to_byte_shape(shape, qtype)
    raw = np.random.default_rng(1).integers(0, 0x3B, stored, dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "none")
    writer.add_tensor("some", raw, raw_dtype=qtype)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    (tensor,) = read_header(tmp_path / "one.gguf").tensors
    piece = GgufPiece(tensor)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, qtype))
    assert piece.layout() == (shape, "F32") and piece.is_quantized
    assert torch.equal(piece.read(), expected)
    assert torch.equal(piece.read((17, 33)), expected[17:33])


@pytest.mark.parametrize("packed", [None, torch.bfloat16, torch.int8, IN_STEPS])
def test_engines_have_the_same_weights(tmp_path: Path, packed: torch.dtype | None) -> None:
    """An engine of a file in Q8_0 is that of a checkpoint with the dequantized numbers: the same graphs, by their
    configuration, and the same weights."""
    directory, file = random_model(tmp_path, "llama"), tmp_path / "model.gguf"
    read = write_gguf(directory, file, "Q8_0")
    save_file(read, directory / "model.safetensors", metadata={"format": "pt"})
    configs = []
    for path, name in ((directory, "hf"), (file, "gguf")):
        checkpoint = open_model(path)
        configs.append(read_model_config(checkpoint))
        convert_weights(checkpoint, configs[-1], torch.bfloat16, tmp_path / f"{name}.safetensors", packed_dtype=packed)
    assert configs[0] == configs[1]
    assert (tmp_path / "hf.safetensors").read_bytes() == (tmp_path / "gguf.safetensors").read_bytes()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_q4_0_keeps_its_codes(tmp_path: Path, family: str) -> None:
    """What an int4 engine keeps of it is what the file says, number by number."""
    directory, file = random_model(tmp_path, family), tmp_path / "model.gguf"
    read = write_gguf(directory, file, "Q4_0")
    checkpoint = open_model(file)
    config = read_model_config(checkpoint)
    for spec in weight_specs(config):
        for source in spec.sources:
            codes = checkpoint.codes(source.name)
            assert (codes is not None) == (len(source.shape) == 2) == checkpoint.has_codes(source.name)
            if codes is not None:
                assert torch.equal(codes.dequantize(), read[source.name])
                assert codes.group_depth == 32


@pytest.mark.parametrize("scaling", ["llama3", "linear", "yarn"])
def test_scaled_rotation(tmp_path: Path, scaling: str) -> None:
    """Llama 3.1's is a tensor of factors, each the unscaled frequency over the scaled one."""
    parameters = {
        "rope_type": scaling,
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 128,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    if scaling != "llama3":
        parameters = {key: value for key, value in parameters.items() if not key.endswith("freq_factor")}
    directory = random_model(tmp_path, "llama", rope_parameters=parameters, max_position_embeddings=512)
    extra = {}
    config = read_model_config(open_model(directory))
    if scaling == "llama3":
        plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
        extra = {"rope_freqs.weight": (plain / inverse_frequencies(config.rope, 16)).numpy()}
    write_gguf(directory, tmp_path / "model.gguf", extra=extra)
    found = read_model_config(open_model(tmp_path / "model.gguf")).for_length(512)
    ours, theirs = inverse_frequencies(found.rope, 16), inverse_frequencies(config.rope, 16)
    torch.testing.assert_close(ours, theirs, rtol=FREQUENCY if scaling == "llama3" else 0, atol=0)
    assert found.rope.amplitude == config.rope.amplitude


def test_parts_are_one_model(tmp_path: Path) -> None:
    directory = random_model(tmp_path, "qwen2")
    write_gguf(directory, tmp_path / "model.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3
    checkpoint = open_model(parts[0])
    assert checkpoint.files() == parts
    weights = load_file(directory / "model.safetensors")
    assert all(torch.equal(checkpoint.read_raw(name), tensor) for name, tensor in weights.items())
