"""``kvforge build --target vllm``: what the engine directory says, and what is refused; no vLLM is needed."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvforge.cli import main
from kvforge.common.errors import BuildError, CheckpointError, CheckpointWarning, EngineError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.build import stages
from kvforge.manifest import load_manifest
from kvforge.runtime import LLMEngine
from kvforge.vllm_engine.settings import load_settings
from tests.support.models.checkpoints import FAMILIES, make_checkpoint
from tests.support.vllm.cuts import RUN
from tests.support.vllm.interpreters import telling_interpreter

ROOT = Path(__file__).resolve().parents[3]
SWIFTKV = ROOT / "model_defs" / "assets" / "tiny-swiftkv"
TEACHER = ROOT / "model_defs" / "assets" / "tiny-teacher"


@pytest.fixture(autouse=True)
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = telling_interpreter(tmp_path)
    monkeypatch.setenv("KVFORGE_VLLM_PYTHON", path)
    return path


def build(checkpoint: Path, output: Path, **options: Any) -> dict[str, Any]:
    manifest = build_engine(checkpoint, output, BuildOptions(target="vllm", **options))
    assert load_manifest(output) == manifest
    return dataclasses.asdict(manifest)


def test_an_engine_refers_to_its_checkpoint(tmp_path: Path, interpreter: str) -> None:
    told: list[str] = []
    options = BuildOptions(target="vllm", tensor_parallel_size=2, engine_args='{"enforce_eager": true}')
    manifest = build_engine(SWIFTKV, tmp_path / "engine", options, progress=told.append)
    assert tuple(told) == stages(options)
    assert (manifest.target, manifest.model.cut, manifest.model.num_layers, manifest.model.num_owners) == (
        "vllm",
        4,
        8,
        6,
    )
    assert (manifest.torch_version, manifest.dtype, manifest.model.early_exit) == ("2.13.0", "bfloat16", False)
    assert sorted(manifest.files) == ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "vllm.json"]
    settings = load_settings(tmp_path / "engine")
    assert (settings.python, settings.vllm_version) == (interpreter, "0.32.0")
    assert (settings.tensor_parallel_size, settings.pipeline_parallel_size) == (2, 1)
    assert settings.config == {}  # config.json names it
    assert settings.has_cut and settings.arguments == {"enforce_eager": True}
    assert settings.checkpoint_in(tmp_path / "engine") == SWIFTKV
    assert not load_settings_of_plain(tmp_path).has_cut


@pytest.mark.parametrize(("checkpoint", "name"), [(SWIFTKV, "LlamaSwiftKVForCausalLM"), (TEACHER, "LlamaForCausalLM")])
def test_a_checkpoint_without_its_class_s_name(tmp_path: Path, checkpoint: Path, name: str) -> None:
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    build(tmp_path / "checkpoint", tmp_path / "engine")
    assert load_settings(tmp_path / "engine").config == {"architectures": [name]}


def test_vllm_is_told_of_a_head_that_config_json_denies(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.warns(CheckpointWarning):
        build(path, tmp_path / "engine")
    assert load_settings(tmp_path / "engine").config == {"tie_word_embeddings": False}


def load_settings_of_plain(tmp_path: Path) -> Any:
    build(TEACHER, tmp_path / "plain", pipeline_parallel_size=2)
    return load_settings(tmp_path / "plain")


def test_a_copied_checkpoint_moves_with_the_engine(tmp_path: Path) -> None:
    build(SWIFTKV, tmp_path / "engine", copy_checkpoint=True)
    (tmp_path / "engine").rename(tmp_path / "moved")
    folder = load_settings(tmp_path / "moved").checkpoint_in(tmp_path / "moved")
    assert (folder / "model.safetensors").read_bytes() == (SWIFTKV / "model.safetensors").read_bytes()


def test_a_checkpoint_that_is_gone_or_changed_is_named(tmp_path: Path) -> None:
    shutil.copytree(SWIFTKV, tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engine")
    settings = load_settings(tmp_path / "engine")
    weights = tmp_path / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(EngineError, match=r"model.safetensors.*is another file than at the build.*--copy-checkpoint"):
        settings.checkpoint_in(tmp_path / "engine")
    weights.unlink()
    with pytest.raises(EngineError, match=r"model.safetensors.*is missing"):
        settings.checkpoint_in(tmp_path / "engine")


def test_a_model_that_kvforge_does_not_know(tmp_path: Path) -> None:
    shutil.copytree(TEACHER, tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    config |= {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "eos_token_id": [1, 2]}
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    found = build(tmp_path / "checkpoint", tmp_path / "engine")["model"]
    assert (found["model_type"], found["cut"], found["num_layers"]) == ("stablelm", 8, 8)
    assert (found["num_kv_heads"], found["head_dim"], found["eos_token_ids"]) == (2, 64, (1, 2))
    del config["num_hidden_layers"]
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no num_hidden_layers"):
        build(tmp_path / "checkpoint", tmp_path / "another")
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_dtype": "fp8"}, "--kv-dtype is for an engine of kvforge's own, but with target vllm"),
        ({"kv_policy": "streaming:budget=64"}, "--kv-policy is for an engine of kvforge's own"),
        ({"weight_dtype": "int8"}, "--weight-dtype is for"),
        ({"max_draft_len": 2}, "--max-draft-len is for"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0; it must be at least 1"),
        ({"tensor_parallel_size": 3}, "does not divide the 4 heads"),
        ({"tensor_parallel_size": 4}, "does not divide the 2 KV heads"),
        ({"pipeline_parallel_size": 2}, "not there for models with a cut"),
        ({"max_seq_len": 4096}, "beyond the 2048 positions"),
        ({"dtype": "int3"}, "--dtype 'int3' is not supported"),
        ({"engine_args": "{"}, "--engine-args is not JSON"),
        ({"engine_args": "[]"}, "--engine-args is no JSON object"),
        ({"engine_args": '{"max_model_len": 3}'}, "max_model_len, which --max-seq-len says"),
        ({"engine_python": "no-such-python"}, "no-such-python is no program"),
    ],
)
def test_what_cannot_be_built_is_said(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BuildError, match=words):
        build(SWIFTKV, tmp_path / "engine", **options)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_a_cut_run_or_are_refused_in_one_sentence(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", family, cut=2)
    capsys.readouterr()  # transformers' progress
    status = main(["build", str(checkpoint), "-o", str(tmp_path / "engine"), "--target", "vllm", "--quiet"])
    errors = capsys.readouterr().err
    assert (status, (tmp_path / "engine").exists()) == ((0, True) if family in RUN else (1, False))
    if family not in RUN:
        assert f"SwiftKV checkpoints of {family} do not run on vLLM" in errors and errors.count("\n") == 1
        assert LACKED.get(family, "") in errors


LACKED = {
    "gpt_oss": "no experts, no attention sinks;",
    "deepseek_v2": "no experts, no latent attention,",
    "glm4": "no norms of branches, no heads that rotate otherwise;",
}


def test_a_quantized_checkpoint_with_a_cut_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SWIFTKV, tmp_path / "checkpoint")
    said = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / "checkpoint" / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(BuildError, match="SwiftKV checkpoints that are quantized do not run on vLLM"):
        build(tmp_path / "checkpoint", tmp_path / "engine")


def test_layers_that_read_others_caches_are_no_cut_of_ours(tmp_path: Path) -> None:
    """vLLM has its own class for such a model, and nothing in it is rewired."""
    kinds = ["sliding_attention", "full_attention"] * 3
    checkpoint = make_checkpoint(
        tmp_path / "checkpoint", "gemma4_text", num_hidden_layers=6, layer_types=kinds, num_kv_shared_layers=2
    )
    manifest = build(checkpoint, tmp_path / "engine")
    settings = load_settings(tmp_path / "engine")
    assert manifest["model"]["cut"] == 4 and not settings.has_cut and settings.config == {}


@pytest.mark.parametrize(
    ("found", "words"),
    [({"vllm": None}, "has no vLLM; install it there"), ({"python": [3, 9]}, "is older than Python 3.10")],
)
def test_an_interpreter_must_have_vllm(tmp_path: Path, found: dict[str, Any], words: str) -> None:
    path = telling_interpreter(tmp_path, **found)
    with pytest.raises(BuildError, match=words):
        build(SWIFTKV, tmp_path / "engine", engine_python=path)


def test_without_an_interpreter_the_command_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVFORGE_VLLM_PYTHON")
    assert main(["build", str(SWIFTKV), "-o", str(tmp_path / "engine"), "--target", "vllm", "--quiet"]) == 1
    assert "pip install vllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [{"tensor_parallel_size": 2}, {"engine_args": "{}"}, {"engine_python": "p"}, {"copy_checkpoint": True}]
)
def test_other_targets_do_not_take_its_options(tmp_path: Path, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(BuildError, match=f"--{name.replace('_', '-')} is for --target vllm"):
        build_engine(SWIFTKV, tmp_path / "engine", BuildOptions(**option))


def test_our_own_engine_says_that_it_is_another_one_s(tmp_path: Path) -> None:
    build(SWIFTKV, tmp_path / "engine")
    with pytest.raises(EngineError, match="was built for target vllm"):
        LLMEngine(tmp_path / "engine")


def test_a_changed_settings_file_is_noticed(tmp_path: Path) -> None:
    build(SWIFTKV, tmp_path / "engine")
    path = tmp_path / "engine" / "vllm.json"
    path.write_text(path.read_text().replace("0.32.0", "0.33.0"))
    with pytest.raises(EngineError, match=r"vllm\.json was changed"):
        load_manifest(tmp_path / "engine")
