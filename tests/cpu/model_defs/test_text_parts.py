"""Checkpoints with parts for images and audio: their text model, by either of the names that its tensors have."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvforge import LLM, SamplingParams
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.cli import main
from kvforge.common.errors import CheckpointError
from kvforge.manifest import load_manifest
from kvforge.planning.load import load_subject
from kvforge.quantize import quantize_checkpoint
from kvforge.rewire import RewireOptions, rewire_checkpoint
from model_defs import ModelError, families, load_config, supported_family
from tests.cpu.model_defs.test_rotations import CHUNKS, LENGTH, YARN, session_logits, session_of, tokens_of
from tests.support.models.multimodal import MODELS, PREFIXES, make_multimodal, renamed
from tests.support.rounding import assert_near, model_error

KINDS = ("sliding_attention", "full_attention")
TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 3, "layer_types": [*KINDS, KINDS[0]], "sliding_window": 24},
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": [*KINDS] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": 24,
        "pad_token_id": 0,
    },
    "qwen3_5": {"num_hidden_layers": 4},
    "qwen3_5_moe": {"num_hidden_layers": 3, "layer_types": ["linear_attention", *["full_attention"] * 2]},
    "mistral3": {
        "num_hidden_layers": 3,
        "model_type": "ministral3",
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4},
    },
}
"""What a text model is, by the ``model_type`` of the whole."""


def model(path: Path, model_type: str, prefix: str = PREFIXES[0], /, **text: Any) -> Path:
    return make_multimodal(path / "model", model_type, prefix, **{**TEXTS[model_type], **text})


def transformers_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    whole = transformers.AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        return whole(torch.tensor([tokens])).logits[0]


def test_every_family_that_is_a_text_part_is_tested() -> None:
    assert {part for family in families().values() for part in family.text_part_of} == set(MODELS) == set(TEXTS)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_session_has_the_logits_of_the_whole_model(
    model_type: str, prefix: str, is_tied: bool, tmp_path: Path
) -> None:
    path = model(tmp_path, model_type, tie_word_embeddings=is_tied)
    session = session_of(path)
    tokens = tokens_of(session)
    expected = transformers_logits(path, tokens)
    tensors = load_file(path / "model.safetensors")
    save_file({renamed(name, prefix): x for name, x in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    session = session_of(path)
    for chunk in CHUNKS[1:]:
        assert_near(session_logits(session, tokens, chunk), expected, model_error(session.config, LENGTH), chunk)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("model_type", MODELS)
def test_other_parts_are_not_read(model_type: str, prefix: str, tmp_path: Path) -> None:
    """They may be of any dtype, and named as the text's are behind their own names."""
    path = model(tmp_path, model_type, prefix)
    checkpoint = open_model(path)
    tensors = load_file(path / "model.safetensors")
    others = set(tensors) - set(checkpoint.stored_names.values())
    assert others and not any("language_model" in name for name in others)
    assert any("vision_tower" in name or "visual" in name for name in others)
    for name in others:
        tensors[name] = torch.full_like(tensors[name], torch.nan)
    tensors["model.vision_tower.layers.9.mlp.down_proj.weight"] = torch.zeros(3, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    again = open_model(path)
    check_weights(again, read_model_config(again))
    assert set(again.file_of_tensor) == set(checkpoint.file_of_tensor)
    assert all(name.startswith("model.") for name in again.file_of_tensor)


@pytest.mark.usefixtures("compiled_with_full")
def test_an_engine_generates_what_the_whole_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint's names are those of the published ones; ends of texts are named outside of the text part."""
    path, engine = model(tmp_path, "gemma3", PREFIXES[1]), tmp_path / "engine"
    hf = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(hf | {"eos_token_id": [2, 319]}))
    asked = ["build", str(path), "-o", str(engine), "--page-size", "8", "--max-num-tokens", "64"]
    assert main(asked) == 0
    said = capsys.readouterr()
    assert "the text model is read; images and audio are not served" in said.err and "gemma3_text" in said.out
    prompt = torch.randint(3, 290, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    assert load_manifest(engine).eos_token_ids == (2, 319)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    tokens = LLM(engine, kv_cache_gib=0.01).generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    expected = transformers_logits(path, [*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    bound = 2 * model_error(read_model_config(open_model(path)), 60) * expected.abs().max()
    assert len(tokens) == 20 and (expected.max(-1).values - chosen <= bound).all()


def test_a_rewired_text_part_is_a_checkpoint_of_its_family(tmp_path: Path) -> None:
    path = model(tmp_path, "gemma3")
    rewire_checkpoint(path, tmp_path / "rewired", RewireOptions(cut=2))
    hf = json.loads((tmp_path / "rewired" / "config.json").read_text())
    assert hf["model_type"] == "gemma3_text_swiftkv" and hf["architectures"] == ["Gemma3SwiftKVForCausalLM"]
    assert "text_config" not in hf and "vision_config" not in hf
    written = open_model(tmp_path / "rewired")
    check_weights(written, read_model_config(written))
    assert not written.is_text_part and not any("vision" in name for name in written.file_of_tensor)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(written.read_raw(name), open_model(path).read_raw(name))


def test_what_has_no_rewired_form_says_so_of_the_whole_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a model of type gemma4_text, which kvforge does not rewire"):
        rewire_checkpoint(model(tmp_path, "gemma4"), tmp_path / "rewired", RewireOptions(cut=2))


def test_a_text_part_is_quantized_in_4_bits_alone(tmp_path: Path) -> None:
    path = model(tmp_path, "gemma3")
    quantize_checkpoint(path, tmp_path / "int4", "int4", num_samples=2, num_tokens=400)
    written = open_model(tmp_path / "int4")
    assert written.hf_config["model_type"] == "gemma3_text" and not written.is_text_part
    assert written.has_codes("model.layers.0.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match="which this recipe does not take; give --recipe int4"):
        quantize_checkpoint(path, tmp_path / "fp8", "fp8", num_samples=2, num_tokens=400)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_plan_is_that_of_the_text_model(model_type: str, tmp_path: Path) -> None:
    path = model(tmp_path, model_type)
    subjects = [load_subject(str(path)), load_subject(str(path / "config.json"))]
    assert subjects[0].model.num_layers == TEXTS[model_type]["num_hidden_layers"]
    assert subjects[0].model == subjects[1].model


PUBLISHED = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
"""What older releases of transformers wrote of a model of 4B: what is not said has its default."""


def test_what_older_configurations_leave_out_is_as_transformers_has_it() -> None:
    config = load_config(PUBLISHED)
    theirs = transformers.Gemma3Config(**copy.deepcopy(PUBLISHED)).text_config
    assert supported_family(PUBLISHED).model_type == config.model_type == "gemma3_text"
    for ours, name in (
        (config.num_heads, "num_attention_heads"),
        (config.num_kv_heads, "num_key_value_heads"),
        (config.head_dim, "head_dim"),
        (config.vocab_size, "vocab_size"),
        (config.max_position, "max_position_embeddings"),
        (config.tie_embeddings, "tie_word_embeddings"),
    ):
        assert ours == getattr(theirs, name), name
    assert config.layer_windows == tuple(1024 * (kind == KINDS[0]) for kind in theirs.layer_types)
    assert config.rope.kind == "linear" and config.rope.factor == 8.0 and config.eos_token_ids == (1, 106)


@pytest.mark.parametrize("part", [None, 3, {"model_type": "llama"}, {}])
def test_a_whole_without_a_text_part_of_its_family_is_refused(part: object) -> None:
    with pytest.raises(ModelError) as error:
        load_config({"model_type": "gemma3", "text_config": part})
    assert str(error.value).endswith(".") and "config.json" in str(error.value)
