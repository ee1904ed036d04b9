"""File names that an index or a manifest gives stay inside its directory."""

import json
import shutil
from pathlib import Path

import pytest

from kvforge.checkpoint import open_checkpoint
from kvforge.common.errors import KvforgeError
from kvforge.common.relative_names import is_inside
from kvforge.manifest import MANIFEST_FILE, load_manifest
from tests.support.models.engines import PLAIN
from tests.support.models.shelf import EngineShelf

OUTSIDE = ["../secret.safetensors", "/etc/passwd", "a/../../secret", "..", "", ".", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside(name: str) -> None:
    assert not is_inside(name)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "rank0/lower.pt2", "a..b", "..a/b"])
def test_names_inside(name: str) -> None:
    assert is_inside(name)


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_of_weights(engines: EngineShelf, tmp_path: Path, name: str) -> None:
    """Even where the file is there and is one of safetensors."""
    checkpoint = shutil.copytree(engines.checkpoint(PLAIN), tmp_path / "checkpoint")
    (checkpoint / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(KvforgeError, match="which is not in the checkpoint"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest(engines: EngineShelf, tmp_path: Path, name: str) -> None:
    engine = shutil.copytree(engines.engine(PLAIN), tmp_path / "engine")
    manifest = json.loads((engine / MANIFEST_FILE).read_text())
    manifest["files"][name] = "0" * 64
    (engine / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(KvforgeError, match="holds impossible values"):
        load_manifest(engine)


@pytest.mark.parametrize("name", ["rank0/lower.pt2", "rank0/operators.so", "tokenizer/tokenizer.json"])
def test_a_changed_file_is_not_loaded(engines: EngineShelf, tmp_path: Path, name: str) -> None:
    """Before anything of it runs. Whoever changes the manifest as well is not stopped: engines are code."""
    engine = shutil.copytree(engines.engine(PLAIN), tmp_path / "engine")
    with (engine / name).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(KvforgeError, match="was changed or damaged"):
        load_manifest(engine)
