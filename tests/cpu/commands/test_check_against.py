"""``kvforge build --check-against``: what of a model a built engine loses."""

import json
from pathlib import Path

import pytest
import torch

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.cli import main
from kvforge.commands.check_against import LENGTH, compare, sentence, unrounded
from kvforge.common.display import Display
from kvforge.common.errors import KvforgeError
from kvforge.compiler import BuildOptions
from kvforge.compiler.options import resolve
from kvforge.manifest import load_manifest
from tests.support.models.checkpoints import make_checkpoint

LIMITS = ["--max-seq-len", "64", "--page-size", "8", "--max-num-tokens", "64"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    return make_checkpoint(folder, num_hidden_layers=1, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "has nothing to compare: weights and cache of this engine are not rounded"),
        (["--kv-dtype", "bfloat16"], "has nothing to compare"),
        (["--target", "cuda", "--kv-dtype", "int8"], "runs engines of --target cpu, not of cuda"),
        (["--target", "vllm"], "runs engines of --target cpu, not of vllm"),
        (["missing", "--kv-dtype", "int8"], "missing cannot be read"),
    ],
)
def test_what_has_nothing_to_compare_is_refused(
    checkpoint: Path, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "e"), "--check-against", *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


def test_a_short_text_is_refused_before_the_build(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, engine = tmp_path / "text", tmp_path / "e"
    text.write_text("short")
    assert main(["build", str(checkpoint), "-o", str(engine), "--kv-dtype", "int8", "--check-against", str(text)]) == 1
    assert "fewer than two documents of 448" in capsys.readouterr().err
    assert not engine.exists()


def test_the_model_beside_it_rotates_as_the_engine_does(tmp_path: Path) -> None:
    """Longrope has other factors for longer sequences than those of the documents."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    path = make_checkpoint(tmp_path / "c", "phi3", rope_scaling=scaling, original_max_position_embeddings=480)
    config = read_model_config(open_model(path))
    resolved = resolve(BuildOptions(page_size=8), config, "F32")
    assert resolved.max_seq_len > 480 > LENGTH
    beside = resolve(unrounded(resolved, BuildOptions(page_size=8)), config, "F32")
    assert config.for_length(beside.max_seq_len) == config.for_length(resolved.max_seq_len)
    assert beside.quantized_weights is None and beside.kv_dtype == beside.dtype == resolved.dtype


@pytest.mark.usefixtures("compiled_with_full")
def test_a_rounded_engine_is_compared_with_its_model(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text of one's own is taken, and one that is too short refused; an engine of which nothing is rounded would be
    the model itself."""
    engine = tmp_path / "engine"
    asked = ["build", str(checkpoint), "-o", str(engine), "--kv-dtype", "int4", *LIMITS, "--json", "-q"]
    assert main([*asked, "--check-against"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = printed["check_against"]
    assert printed["kv_dtype"] == "int4" and found["source"] == "package"
    assert found["num_documents"] == 8 and found["num_tokens"] == 8 * 63
    assert found["kl"]["value"] > 0 and found["agreement"]["value"] < 1
    assert f"504 tokens of package: KL {found['kl']['value']:.4f} nats a token" in sentence(found)
    text, manifest, options = tmp_path / "text", load_manifest(engine), BuildOptions(page_size=8)
    text.write_text("A text of one's own. " * 20)
    own = compare(checkpoint, engine, manifest, options, str(text), Display(quiet=True))
    assert own["num_tokens"] == 6 * 63 and own["source"] == str(text) and own["kl"] != found["kl"]
    text.write_text("short")
    with pytest.raises(KvforgeError, match="fewer than two documents of 64"):
        compare(checkpoint, engine, manifest, options, str(text), Display(quiet=True))
