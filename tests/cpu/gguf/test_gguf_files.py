"""Heads of GGUF files: read as the library reads them, and refused by one sentence where they are not sound."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kvforge.checkpoint.gguf.header import read_header
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.common.checkpoint_files import is_gguf
from kvforge.common.errors import KvforgeError
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_files import OWN, write_gguf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gguf") / "hf", "llama", **SIZES)


@pytest.fixture(scope="module")
def whole(directory: Path) -> Path:
    write_gguf(directory, directory.parent / "whole.gguf", "Q4_0")
    return directory.parent / "whole.gguf"


def refusal(path: Path) -> str:
    """The one sentence."""
    with pytest.raises(KvforgeError) as caught:
        checkpoint = open_model(path)
        check_weights(checkpoint, read_model_config(checkpoint))
        checkpoint.folder  # noqa: B018
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


def test_as_the_library_reads_it(tmp_path: Path) -> None:
    """Every type of value, and tensors of one to three dimensions."""
    writer = gguf.GGUFWriter(tmp_path / "some.gguf", "thing")
    add = {
        "u8": (writer.add_uint8, 255), "i8": (writer.add_int8, -7), "u16": (writer.add_uint16, 65535),
        "i16": (writer.add_int16, -300), "u32": (writer.add_uint32, 2**32 - 1), "i32": (writer.add_int32, -(2**31)),
        "u64": (writer.add_uint64, 2**64 - 1), "i64": (writer.add_int64, -(2**63)), "f64": (writer.add_float64, 1e-300),
        "bool": (writer.add_bool, True), "text": (writer.add_string, "é ▁"), "ints": (writer.add_array, [1, -2, 3]),
        "texts": (writer.add_array, ["a", "", "ü"]), "floats": (writer.add_array, [0.5, -1.25]),
        "flags": (writer.add_array, [True, False]),
    }  # fmt: skip
    for key, (write, value) in add.items():
        write(f"thing.{key}", value)
    writer.add_float32("thing.f32", 1e-5)
    for name, shape in (("one", (5,)), ("two", (3, 4)), ("three", (2, 3, 4))):
        writer.add_tensor(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    header, reader = read_header(tmp_path / "some.gguf"), gguf.GGUFReader(tmp_path / "some.gguf")
    assert {key: header.metadata[f"thing.{key}"] for key in add} == {key: value for key, (_, value) in add.items()}
    assert header.metadata["thing.f32"] == 1e-5
    assert {key for key in reader.fields if not key.startswith("GGUF.")} == set(header.metadata)
    for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert (ours.name, ours.offset, ours.num_bytes) == (theirs.name, theirs.data_offset, theirs.n_bytes)
        assert ours.shape == tuple(reversed(theirs.shape.tolist())) and ours.kind == theirs.tensor_type.name


def test_a_file_is_known_by_its_name_or_its_first_bytes(whole: Path, tmp_path: Path) -> None:
    plain = tmp_path / "model.bin"
    plain.write_bytes(whole.read_bytes())
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "other").write_text("text")
    assert is_gguf(whole) and is_gguf(plain) and is_gguf(tmp_path / "missing.gguf")
    assert not is_gguf(tmp_path / "folder.gguf") and not is_gguf(tmp_path / "other") and not is_gguf(tmp_path)
    assert open_model(plain).hf_config == open_model(whole).hf_config
    assert "does not exist" in refusal(tmp_path / "missing.gguf")


def test_no_truncated_file_is_read(whole: Path, tmp_path: Path) -> None:
    """Wherever it ends: within magic, counts, keys, texts, arrays, descriptions of tensors, or their numbers."""
    content = whole.read_bytes()
    data = read_header(whole).tensors[0].offset
    ends = [0, 3, 4, 7, 8, 15, 23, *range(24, data, max(data // 60, 1)), data, data + 1, len(content) - 1]
    for end in ends:
        file = tmp_path / "cut.gguf"
        file.write_bytes(content[:end])
        assert "again" in (said := refusal(file)) or "is not a GGUF file" in said, end


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"GGML", "is not a GGUF file: it begins with b'GGML'"),
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3), "is a big-endian GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "is of version 1 of GGUF; supported are 2 and 3"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_other_files(whole: Path, tmp_path: Path, start: bytes, said: str) -> None:
    file = tmp_path / "other.gguf"
    file.write_bytes(start + whole.read_bytes()[len(start) :])
    assert said in refusal(file)


def test_a_count_beyond_the_file_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "huge.gguf"
    for counts in ((0, 2**62), (2**62, 0)):
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
        assert "ends within its head" in refusal(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keys": {"general.architecture": "mamba"}}, "has a model of 'mamba', which is not supported as GGUF"),
        ({"without": ("llama.block_count",)}, "has no llama.block_count"),
        ({"without": ("llama.attention.layer_norm_rms_epsilon",)}, "has no llama.attention.layer_norm_rms_epsilon"),
        ({"keys": {"llama.attention.head_count_kv": [2, 1]}}, "must be a whole number, one for all layers"),
        ({"keys": {"llama.block_count": "two"}}, "must be a whole number, one for all layers"),
        ({"keys": {"llama.attention.value_length": 8}}, "heads of K and V must have one size"),
        ({"keys": {"llama.attention.clamp_kqv": 8.0}}, "says llama.attention.clamp_kqv 8.0, which is not supported"),
        ({"keys": {"llama.attention.causal": False}}, "says llama.attention.causal False, which is not supported"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "partial_rotary_factor must be 1"),
        ({"keys": {"llama.rope.scaling.type": "dynamic"}}, "says llama.rope.scaling.type 'dynamic'"),
        ({"keys": {"llama.block_count": 3}}, "fewer layers than the 3"),
        ({"keys": {"llama.block_count": 1}}, "has tensor blk.1.attn_norm.weight, which has no place"),
        ({"keys": {"general.type": "adapter"}}, "holds no model but is of the kind 'adapter'"),
        ({"keys": {"llama.expert_count": 4, "llama.expert_used_count": 2}}, "which has no place in a mixtral model"),
        ({"extra": {"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}}, "has tensor blk.0.attn_rot_embd.weight"),
        (
            {"extra": {"rope_factors_long.weight": np.ones(8, np.float32)}},
            "Tensor rope_factors_short.weight is missing",
        ),
        ({"extra": {"some.weight": np.ones(4, np.float64)}}, "has the format F64; supported are F32"),
        ({"keys": {"split.count": 2}}, "is one of 2 parts of a model and not called NAME-00001-of-00002.gguf"),
        ({"without": ("tokenizer.ggml.model",)}, "has no tokenizer.ggml.model"),
        ({"without": ("tokenizer.ggml.tokens",)}, "has no tokenizer.ggml.tokens"),
        (
            {"keys": {"tokenizer.ggml.model": "bert"}},
            "has a tokenizer of the kind 'bert'; supported are gpt2 and llama",
        ),
        ({"keys": {"tokenizer.ggml.eos_token_id": 9999}}, "says tokenizer.ggml.eos_token_id 9999, and has 320 tokens"),
        ({"keys": {"tokenizer.ggml.scores": [1.0]}}, "has not one tokenizer.ggml.scores for each of 320 tokens"),
        ({"keys": {"tokenizer.ggml.tokens": ["a"] * 320}}, "has the token 'a' twice"),
        ({"keys": {"tokenizer.ggml.add_bos_token": 3}}, "says tokenizer.ggml.add_bos_token 3"),
        ({"keys": {"tokenizer.ggml.precompiled_charsmap": [1]}}, "has tokenizer.ggml.precompiled_charsmap"),
        (
            {"keys": {"tokenizer.chat_template.a/b": "x"}},
            "has 'tokenizer.chat_template.a/b', which is no chat template",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(directory: Path, tmp_path: Path, changes: dict, said: str) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(directory, file, **changes)
    assert said in refusal(file)


def test_a_pre_tokenizer_that_is_not_known(directory: Path, tmp_path: Path) -> None:
    for pre, said in (("default", "has the pre-tokenizer 'default'"), (None, "has no tokenizer.ggml.pre")):
        keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["t 2"], "tokenizer.ggml.pre": pre}
        write_gguf(directory, tmp_path / "model.gguf", keys=keys)
        assert said in refusal(tmp_path / "model.gguf")


def test_a_missing_tensor_is_named(directory: Path, tmp_path: Path) -> None:
    """By the name that the checkpoint would have."""
    other = tmp_path / "hf"
    other.mkdir()
    (other / "config.json").write_bytes((directory / "config.json").read_bytes())
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, other / "model.safetensors")
    write_gguf(other, tmp_path / "model.gguf")
    assert "Tensor model.layers.1.mlp.up_proj.weight is missing" in refusal(tmp_path / "model.gguf")


def test_parts_that_do_not_belong_together(directory: Path, tmp_path: Path) -> None:
    write_gguf(directory, tmp_path / "model.gguf", split_max_tensors=9)
    first, second, third = sorted(tmp_path.glob("model-*.gguf"))
    assert f"is not the first of 3 parts; give {first}" in refusal(second)
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    assert "is not part 2 of the 3" in refusal(first)
    second.unlink()
    assert f"{second}, part 2 of 3 of {first}, is missing" in refusal(first)
    second.write_bytes(content[:-100])
    assert "ends within tensor" in refusal(first)


def test_layers_of_the_deepest_gemma_scale_scores_by_their_width(tmp_path: Path) -> None:
    """Which files do not say."""
    fields = {**SIZES, **OWN["gemma3_text"], "num_hidden_layers": 62, "hidden_size": 96, "intermediate_size": 32}
    directory = make_checkpoint(tmp_path / "hf", "gemma3_text", **fields)
    write_gguf(directory, tmp_path / "model.gguf")
    assert open_model(tmp_path / "model.gguf").hf_config["query_pre_attn_scalar"] == 96 // 4


ODD = ("x", -1, 2**64 - 1, 1e30, float("nan"), True, [1, 2], ["a", "b"], [0.5], 0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss"])
def test_values_of_other_kinds_are_read_or_refused(tmp_path: Path, family: str) -> None:
    """Whatever a key says, there is a model of its numbers, or one sentence."""
    directory = make_checkpoint(tmp_path / "hf", family, **{**SIZES, **OWN.get(family, {})})
    file = tmp_path / "model.gguf"
    write_gguf(directory, file)
    rng, refused = random.Random(family), 0
    for key in sorted(read_header(file).metadata):
        for value in rng.sample(ODD, 3):
            write_gguf(directory, file, keys={key: value})
            try:
                checkpoint = open_model(file)
                check_weights(checkpoint, read_model_config(checkpoint))
                assert (checkpoint.folder / "tokenizer.json").is_file()
            except KvforgeError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 1000, (key, value)
    assert refused > 20
