"""Checkpoints by name, from a Hub on loopback into huggingface_hub's cache."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.hub_server import TOKEN, HubServer, Repository, hub_server

ROOT = Path(__file__).parents[3]
NAME = "someone/small-model"
SHARDS = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
NEEDED = ["config.json", "generation_config.json", "model.safetensors.index.json", *SHARDS, "tokenizer.json"]
ELSE = [
    *("pytorch_model-00001-of-00002.bin", "model.gguf", "README.md", "consolidated.safetensors"),
    *("original/consolidated.00.pth", "original/model.safetensors", "onnx/model.onnx"),
]
LIMITED = """
import resource, sys
from kvforge.common.errors import KvforgeError
from kvforge.hub import find_checkpoint
if int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
try:
    print(find_checkpoint(*sys.argv[2:]))
except KvforgeError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub with one model of two shards, beside files that no engine needs."""
    folder = tmp_path / "repository"
    for name in (*NEEDED, *ELSE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name}))
    for index, name in enumerate(SHARDS):
        save_file({f"tensor{index}": torch.arange(50_000) + index}, folder / name)
    weight_map = {f"tensor{index}": name for index, name in enumerate(SHARDS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with hub_server() as server:
        server.repositories[NAME] = Repository(folder, branches=("main", "v1.0"))
        yield server


def find(
    hub: HubServer, cache: Path, *arguments: str, limit: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(limit), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=hub.environment(cache, PYTHONPATH=str(ROOT), **environment)
    )


def found(result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one sentence that a failed download ends with."""
    assert result.returncode == 1 and result.stdout == "" and "Traceback" not in result.stderr
    *_, line = result.stderr.strip().splitlines()
    assert line.endswith(".")
    return line


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_what_is_needed_is_downloaded_and_once(hub: HubServer, tmp_path: Path) -> None:
    folder = found(find(hub, tmp_path / "cache", NAME))
    assert names(folder) == sorted(NEEDED)
    assert sorted(hub.downloads()) == sorted(NEEDED)
    for name in NEEDED:
        assert (folder / name).read_bytes() == (hub.repositories[NAME].folder / name).read_bytes()
    hub.requests.clear()
    assert found(find(hub, tmp_path / "cache", NAME)) == folder
    assert hub.downloads() == []


def test_one_file_of_weights_needs_no_index(hub: HubServer, tmp_path: Path) -> None:
    source = hub.repositories[NAME].folder
    (source / "model.safetensors.index.json").unlink()
    (source / SHARDS[0]).rename(source / "model.safetensors")
    folder = found(find(hub, tmp_path / "cache", NAME))
    assert names(folder) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


def test_a_filled_cache_needs_no_network(hub: HubServer, tmp_path: Path) -> None:
    folder = found(find(hub, tmp_path / "cache", NAME))
    hub.requests.clear()
    assert found(find(hub, tmp_path / "cache", NAME, HF_HUB_OFFLINE="1")) == folder
    assert hub.requests == []
    assert found(find(hub, tmp_path / "cache", NAME, HF_ENDPOINT="http://127.0.0.1:9")) == folder
    (folder / SHARDS[1]).unlink()
    line = refusal(find(hub, tmp_path / "cache", NAME, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE" in line


@pytest.mark.parametrize("arguments", [(f"{NAME}@v1.0",), (NAME, "v1.0"), (f"{NAME}@v1.0", "v1.0")])
def test_a_revision_is_given_in_either_way(hub: HubServer, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = found(find(hub, tmp_path / "cache", *arguments))
    assert (folder.parents[1] / "refs" / "v1.0").read_text() == hub.repositories[NAME].commit


def test_tokens_are_huggingface_hubs_own(hub: HubServer, tmp_path: Path) -> None:
    for access, words in (("gated", "is gated"), ("private", "neither a path here nor a repository")):
        hub.repositories[NAME].access = access
        line = refusal(find(hub, tmp_path / access, NAME))
        assert words in line and "hf auth login" in line
        if access == "gated":  # a token without the right is 403 instead of 401
            assert "is gated" in refusal(find(hub, tmp_path / access, NAME, HF_TOKEN="hf_of_somebody_else"))
        assert names(found(find(hub, tmp_path / access, NAME, HF_TOKEN=TOKEN))) == sorted(NEEDED)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["someone/no-such-model"], {}, "someone/no-such-model is neither a path here nor a repository"),
        ([f"{NAME}@v9"], {}, f"{NAME} has no revision v9"),
        ([NAME, "v9"], {}, f"{NAME} has no revision v9"),
        ([f"{NAME}@v1.0", "main"], {}, "names another revision than --revision main"),
        (["some--one/model"], {}, "nor a name that the Hub allows"),
        ([NAME], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ([NAME], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hub cannot be reached"),
    ],
)
def test_each_failure_is_a_sentence(
    hub: HubServer, tmp_path: Path, arguments: list[str], environment: dict[str, str], words: str
) -> None:
    assert words in refusal(find(hub, tmp_path / "cache", *arguments, **environment))
    assert not list((tmp_path / "cache").rglob("snapshots/*/*"))


def test_a_full_disk_leaves_no_half_file(hub: HubServer, tmp_path: Path) -> None:
    line = refusal(find(hub, tmp_path / "cache", NAME, limit=100_000))
    assert "cannot be kept in" in line and "HF_HOME" in line
    assert not list((tmp_path / "cache").rglob("snapshots/*/*.safetensors"))
    assert names(found(find(hub, tmp_path / "cache", NAME))) == sorted(NEEDED)


def test_a_broken_connection_goes_on_where_it_ended(hub: HubServer, tmp_path: Path) -> None:
    shard = hub.repositories[NAME].folder / SHARDS[0]
    save_file({"tensor0": torch.arange(1_600_000)}, shard)  # more than the 10 MiB that are written at once
    hub.cut[SHARDS[0]] = 12_000_000
    folder = found(find(hub, tmp_path / "cache", NAME))
    assert (folder / SHARDS[0]).read_bytes() == shard.read_bytes()
    assert [line for line in hub.downloads() if line.startswith(f"{SHARDS[0]} bytes=")]


def test_an_interrupted_download_keeps_whole_files(hub: HubServer, tmp_path: Path) -> None:
    hub.withheld.add(SHARDS[1])
    line = refusal(find(hub, tmp_path / "cache", NAME))
    assert NAME in line
    hub.withheld.clear()
    hub.requests.clear()
    assert names(found(find(hub, tmp_path / "cache", NAME))) == sorted(NEEDED)
    assert hub.downloads() in ([SHARDS[1]], SHARDS)


def test_a_repository_without_such_weights_is_refused(hub: HubServer, tmp_path: Path) -> None:
    source = hub.repositories[NAME].folder
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../evil.safetensors"}}')
    assert "no weight_map" in refusal(find(hub, tmp_path / "cache", NAME))
    (source / "model.safetensors.index.json").unlink()
    assert "no safetensors weights" in refusal(find(hub, tmp_path / "other", NAME))
    (source / "config.json").unlink()
    assert "has no config.json" in refusal(find(hub, tmp_path / "third", NAME))


def test_a_path_wins_over_a_name(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert found(find(hub, tmp_path / "cache", NAME)) == Path(NAME)
    assert "--revision is for names of the Hub" in refusal(find(hub, tmp_path / "cache", NAME, "main"))
    for path in ("one", "a/b/c", "/a/b", "./a/b", "../a", "a/"):
        assert found(find(hub, tmp_path / "cache", path)) == Path(path)
    assert hub.requests == []
