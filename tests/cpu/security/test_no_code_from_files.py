"""Files that run code when a careless program reads them: none of ours does, whatever they are called."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from kvforge.checkpoint import open_checkpoint
from kvforge.checkpoint.model import read_model_config
from kvforge.common.errors import KvforgeError
from kvforge.compiler.recipe import load_recipe
from kvforge.distill.state import load_state
from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.files import read_tokenizer
from tests.support.models.engines import PLAIN
from tests.support.models.shelf import EngineShelf


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


@pytest.fixture
def poison(marker: Path) -> bytes:
    return pickle.dumps({"weights": Evil(marker)}, protocol=2)


def test_the_poison_works(marker: Path, poison: bytes) -> None:
    pickle.loads(poison)
    assert marker.exists()


@pytest.fixture
def checkpoint(engines: EngineShelf, tmp_path: Path) -> Path:
    return shutil.copytree(engines.checkpoint(PLAIN), tmp_path / "checkpoint")


def test_pickles_and_modules_beside_the_weights(checkpoint: Path, marker: Path, poison: bytes) -> None:
    """`auto_map` names Python files of the checkpoint, which transformers runs when it is told to trust them."""
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pth", "scheduler.pkl"):
        (checkpoint / name).write_bytes(poison)
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py", "conftest.py"):
        (checkpoint / name).write_text(f"open({str(marker)!r}, 'w').close()")
    evil = {name: f"{kind}_evil.Evil" for name, kind in [("AutoConfig", "configuration"), ("AutoModel", "modeling")]}
    for name in ("config.json", "tokenizer_config.json"):
        path = checkpoint / name
        data = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**data, "auto_map": {**evil, "AutoTokenizer": ["tokenization_evil.Evil", None]}}))
    opened = open_checkpoint(checkpoint)
    read_model_config(opened)
    for name in opened.file_of_tensor:
        opened.read_raw(name)
    opened.sha256()
    read_tokenizer(checkpoint / "tokenizer.json")
    ChatTemplate.from_dir(checkpoint)
    assert not marker.exists()


def test_a_pickle_named_safetensors(checkpoint: Path, marker: Path, poison: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(poison)
    with pytest.raises(KvforgeError, match="not a readable safetensors file"):
        open_checkpoint(checkpoint)
    assert not marker.exists()


def test_a_checkpoint_of_pickles_alone(checkpoint: Path, marker: Path, poison: bytes) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(poison)
    with pytest.raises(KvforgeError, match=r"no \*\.safetensors weights; convert"):
        open_checkpoint(checkpoint)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_pickle_where_json_belongs(checkpoint: Path, marker: Path, poison: bytes, name: str) -> None:
    (checkpoint / name).write_bytes(poison)
    with pytest.raises((KvforgeError, UnicodeDecodeError)):
        open_checkpoint(checkpoint)
        read_tokenizer(checkpoint / "tokenizer.json")
        ChatTemplate.from_dir(checkpoint)
    assert not marker.exists()


def test_a_training_state(tmp_path: Path, marker: Path, poison: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(poison)
    with pytest.raises(KvforgeError, match="not a readable training state"):
        load_state(tmp_path / "state.pt", {})
    assert not marker.exists()


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {}']",
        "!!python/object/new:os.system ['touch {}']",
        "!!python/name:os.system",
    ],
)
def test_a_recipe(tmp_path: Path, marker: Path, value: str) -> None:
    recipe = tmp_path / "evil.yaml"
    for text in (f"target: {value.format(marker)}\n", f"{value.format(marker)}\n", f"? {value.format(marker)}\n: 1\n"):
        recipe.write_text(text)
        with pytest.raises(KvforgeError):
            load_recipe(recipe)
    assert not marker.exists()
