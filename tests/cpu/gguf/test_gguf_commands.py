"""Commands that take a checkpoint, given a GGUF file."""

import gc
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvforge.checkpoint.model import open_model
from kvforge.cli import main
from kvforge.common.errors import EngineError
from kvforge.compiler.manifest_fields import copy_tokenizer
from kvforge.engine_cache.names import names_checkpoint
from kvforge.manifest import load_manifest
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_files import write_gguf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(make_checkpoint(folder / "hf", "llama", **SIZES), folder / "Tiny-0.1.Q4_0.gguf", "Q4_0")
    return folder / "Tiny-0.1.Q4_0.gguf"


def test_a_plan_is_of_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of the checkpoint that it was made of, but for its name and the weights in 4 bits that it can keep."""
    plans = []
    for model in (file, file.parent / "hf"):
        arguments = ["--model", str(model), "--input", "256", "--weight-dtype", "int4", "--json"]
        assert main(["plan", *arguments]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["model"] == "Tiny-0.1.Q4_0"
    rows = [[(row["name"], row["table_1_gflop"]) for row in plan["variants"]] for plan in plans]
    assert rows[0] == rows[1]


def test_it_is_a_checkpoint_to_serve(file: Path, tmp_path: Path) -> None:
    assert names_checkpoint(file) and not names_checkpoint(tmp_path / "missing.gguf")
    with pytest.raises(EngineError, match="is not an engine directory but a checkpoint; make one of it with"):
        load_manifest(file)


def test_rewiring_takes_it(file: Path, tmp_path: Path) -> None:
    """What it writes is a checkpoint of its own, with the file's tokenizer."""
    output = tmp_path / "cut"
    assert main(["rewire", str(file), str(output), "--cut-layer", "2", "--init", "copy"]) == 0
    written = open_model(output)
    assert written.hf_config["num_key_value_layers"] == 2
    tokens = Tokenizer.from_file(str(output / "tokenizer.json")).get_vocab()
    assert tokens["<s>"] == 1 and tokens["t300"] == 300
    name = "model.layers.0.mlp.down_proj.weight"
    assert written.read_raw(name).equal(open_model(file).read_raw(name))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "{file}", "-o", "{out}", "--target", "vllm"], "is a GGUF file, which target vllm is not given"),
        (["quantize", "{file}", "-o", "{out}", "--recipe", "fp8"], "is a GGUF file, which this recipe does not take"),
        (["build", "{out}.gguf", "-o", "{out}"], "does not exist"),
    ],
)
def test_who_refuses_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [each.format(file=file, out=tmp_path / "out") for each in arguments]
    assert main(given) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_beside_the_weights_go_with_the_checkpoint(file: Path, tmp_path: Path) -> None:
    """Nothing is written before they are asked for, and nothing stays."""
    checkpoint = open_model(file)
    assert checkpoint.side_folder is not None and "path" not in vars(checkpoint.side_folder)
    copy_tokenizer(checkpoint, tmp_path / "tokenizer")
    folder = checkpoint.folder
    names = sorted(path.name for path in (tmp_path / "tokenizer").iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    assert folder.is_dir() and checkpoint.folder == folder
    del checkpoint
    gc.collect()
    assert not folder.exists()
    assert open_model(file).sha256() == open_model(file).sha256()
