"""The cache of engines: found again by content, options and machine, built once, and whole or not there."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from kvforge.cli import main
from kvforge.common.errors import BuildError, EngineError, KvforgeError
from kvforge.compiler import BuildOptions
from kvforge.engine_cache import build as cache_build
from kvforge.engine_cache import key as cache_key
from kvforge.engine_cache.build import CachedEngine, cached_engine
from kvforge.engine_cache.names import check_is_there, names_checkpoint
from kvforge.engine_cache.store import list_entries, remove_all, remove_entry
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.engines import PLAIN
from tests.support.models.shelf import EngineShelf
from tests.support.serving.serve_process import FREE_PORTS

ASK = """
import shutil, sys, time
from pathlib import Path
from kvforge.engine_cache import build
def fake(checkpoint, output, options, **progress):
    Path(output).mkdir()
    (Path(output) / "half").touch()
    print("building", flush=True)
    while not Path(sys.argv[4]).exists():
        time.sleep(0.01)
    shutil.rmtree(output)
    shutil.copytree(sys.argv[3], output)
build.build_engine = fake
print(build.cached_engine(sys.argv[1], folder=Path(sys.argv[2])).path, flush=True)
"""
"""Asks for an engine of argv[1] from the cache argv[2]; its build copies argv[3] once argv[4] is there."""


@pytest.fixture
def checkpoint(engines: EngineShelf, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engines.checkpoint(PLAIN), tmp_path / "small"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFORGE_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builds(engines: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> list[BuildOptions]:
    """What was built since; each build copies an engine that is there."""
    built: list[BuildOptions] = []
    engine = engines.engine(PLAIN)

    def build(checkpoint: Path, output: Path, options: BuildOptions, **progress: object) -> None:
        built.append(options)
        shutil.copytree(engine, output)

    monkeypatch.setattr(cache_build, "build_engine", build)
    return built


@pytest.fixture
def cached(checkpoint: Path, folder: Path, builds: list[BuildOptions]) -> Iterator[CachedEngine]:
    engine = cached_engine(checkpoint, folder=folder)
    yield engine
    engine.release()


def ask(checkpoint: Path, folder: Path, engine: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", ASK, str(checkpoint), str(folder), str(engine), str(folder.parent / "go")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_start_builds_nothing(
    cached: CachedEngine, checkpoint: Path, folder: Path, builds: list[BuildOptions]
) -> None:
    llm = LLM(checkpoint, kv_cache_gib=0.1, quiet=True)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert len(builds) == 1
    assert [entry.engine for entry in list_entries(folder)] == [str(cached.path)]


def test_another_content_option_or_machine_is_another_engine(
    cached: CachedEngine, checkpoint: Path, folder: Path, builds: list[BuildOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {cached.key, cached_engine(checkpoint, BuildOptions(kv_dtype="fp8"), folder=folder).key}
    monkeypatch.setattr(cache_key, "best_isa", lambda: "another")
    keys.add(cached_engine(checkpoint, folder=folder).key)
    monkeypatch.setenv("KVFORGE_BUILD_ISA", "portable")
    keys.add(cached_engine(checkpoint, folder=folder).key)
    monkeypatch.undo()
    monkeypatch.setattr(cache_build, "build_engine", lambda *given, **more: pytest.fail("built again"))
    moved = shutil.copytree(checkpoint, checkpoint.parent / "moved")
    assert cached_engine(moved, folder=folder).key == cached.key
    with (moved / "generation_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(pytest.fail.Exception, match="built again"):
        cached_engine(moved, folder=folder)
    assert len(keys) == len(builds) == 4


def test_another_predictor_is_another_engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_build, "build_engine", lambda checkpoint, output, options, **progress: output.mkdir())
    checkpoint, keys = make_checkpoint(tmp_path / "base"), []
    for seed in (1, 1, 2):
        options = BuildOptions(kv_prediction=str(make_checkpoint(tmp_path / "predictor", seed=seed)))
        keys.append(cached_engine(checkpoint, options, folder=folder).key)
    assert keys[0] == keys[1] != keys[2]


def test_another_draft_head_is_another_engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_build, "build_engine", lambda checkpoint, output, options, **progress: output.mkdir())
    checkpoint, keys = make_checkpoint(tmp_path / "base"), []
    for seed in (1, 1, 2):
        head = make_checkpoint(tmp_path / "head", seed=seed)
        keys.append(cached_engine(checkpoint, BuildOptions(draft_head=str(head), max_draft_len=2), folder=folder).key)
    assert keys[0] == keys[1] != keys[2]


def test_another_text_that_weights_are_rounded_by_is_another_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the package's text became another. Without rounding there is none."""
    monkeypatch.setattr(cache_build, "build_engine", lambda checkpoint, output, options, **progress: output.mkdir())
    checkpoint, keys, text = make_checkpoint(tmp_path / "base"), [], tmp_path / "text"
    monkeypatch.setattr("kvforge.compiler.calibration.PACKAGE_TEXT", text)
    for content in ("one", "one", "two"):
        text.write_text(content)
        for weights in ("int8", "auto"):
            keys.append(cached_engine(checkpoint, BuildOptions(weight_dtype=weights), folder=folder).key)
    assert keys[0] == keys[2] != keys[4] and keys[1] == keys[3] == keys[5]


def test_a_checkpoint_is_hashed_once(
    checkpoint: Path, folder: Path, builds: list[BuildOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_key, "_SETTLED_NS", -(10**12))  # as if nothing had changed lately
    first = cached_engine(checkpoint, folder=folder)
    monkeypatch.setattr(cache_key.Checkpoint, "sha256", lambda self: pytest.fail("read again"))
    assert cached_engine(checkpoint, folder=folder).key == first.key
    os.utime(checkpoint / "config.json")
    with pytest.raises(pytest.fail.Exception, match="read again"):
        cached_engine(checkpoint, folder=folder)


def test_two_processes_build_once(checkpoint: Path, folder: Path, engines: EngineShelf) -> None:
    first = ask(checkpoint, folder, engines.engine(PLAIN))
    assert first.stdout is not None and first.stdout.readline() == "building\n"
    second = ask(checkpoint, folder, engines.engine(PLAIN))
    assert second.stderr is not None and "another process builds" in second.stderr.readline()
    (folder.parent / "go").touch()
    results = [process.communicate(timeout=120) for process in (first, second)]
    assert first.returncode == second.returncode == 0, results
    assert results[0][0] == results[1][0]  # "building" was read before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_engine(
    number: signal.Signals, checkpoint: Path, folder: Path, engines: EngineShelf, builds: list[BuildOptions]
) -> None:
    process = ask(checkpoint, folder, engines.engine(PLAIN))
    assert process.stdout is not None and process.stdout.readline() == "building\n"
    process.send_signal(number)
    process.communicate(timeout=120)
    assert list_entries(folder) == [] and not [path for path in folder.iterdir() if len(path.name) == 24]
    assert len(list(folder.glob(".*.building"))) == (number == signal.SIGKILL)
    cached_engine(checkpoint, folder=folder).release()
    assert len(builds) == 1 and not list(folder.glob(".*.building"))


def test_a_failed_build_leaves_nothing(checkpoint: Path, folder: Path) -> None:
    with pytest.raises(BuildError, match="--page-size is 0"):
        cached_engine(checkpoint, BuildOptions(page_size=0), folder=folder)
    assert list_entries(folder) == [] and not list(folder.glob(".*.building"))


def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(checkpoint: Path, output: Path, options: BuildOptions, **progress: object) -> None:
        output.mkdir()
        (output / "half").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_build, "build_engine", full)
    with pytest.raises(KvforgeError, match="No space left on device; free space"):
        cached_engine(checkpoint, folder=folder)
    assert list_entries(folder) == [] and not list(folder.glob(".*.building"))


def test_removing_needs_a_key_or_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cache", "remove"])
    assert "required" in capsys.readouterr().err
    assert main(["cache", "list"]) == 0 and "0 engines, 0 bytes" in capsys.readouterr().out


def test_a_damaged_engine_is_built_anew(
    cached: CachedEngine, checkpoint: Path, folder: Path, builds: list[BuildOptions], capsys: pytest.CaptureFixture
) -> None:
    (cached.path / "rank0/lower.pt2").write_bytes(b"")
    again = cached_engine(checkpoint, folder=folder)
    assert again.path == cached.path and len(builds) == 2 and (cached.path / "rank0/lower.pt2").stat().st_size > 0
    assert "built anew" in capsys.readouterr().err
    again.release()


def test_the_command_lists_and_removes(
    cached: CachedEngine, checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    os.utime(folder / cached.key / "entry.json", (1, 1))
    other = cached_engine(checkpoint, BuildOptions(kv_dtype="fp8"), folder=folder)
    capsys.readouterr()
    assert main(["cache", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["key"] for entry in listed] == [other.key, cached.key]
    assert [entry["options"] for entry in listed] == [{"kv_dtype": "fp8"}, {}]
    assert listed[1]["source"] == str(checkpoint) and listed[1]["last_used"] == 1
    assert listed[1]["num_bytes"] > sum(file.stat().st_size for file in cached.path.rglob("*") if file.is_file())
    assert main(["cache", "list"]) == 0
    assert "kv_dtype fp8" in (text := capsys.readouterr().out) and "2 engines" in text
    assert main(["cache", "remove", cached.key]) == 1
    assert "while a process uses it" in capsys.readouterr().err
    cached.release()
    assert main(["cache", "remove", cached.key[:10]]) == 0
    assert main(["cache", "remove", cached.key]) == 1
    assert "has 0 engines" in capsys.readouterr().err
    assert main(["cache", "remove", "--all"]) == 1
    other.release()
    (folder / ".left.building").mkdir()
    assert main(["cache", "remove", "--all"]) == 0
    assert list(folder.iterdir()) == []


def test_an_entry_in_use_is_released_with_its_llm(checkpoint: Path, folder: Path, builds: list[BuildOptions]) -> None:
    llm = LLM(checkpoint, kv_cache_gib=0.1, quiet=True)
    with pytest.raises(KvforgeError, match="while a process uses it"):
        remove_all(folder)
    del llm
    assert len(remove_all(folder)) == 1


def test_engines_and_paths_are_not_built(engines: EngineShelf, tmp_path: Path, folder: Path) -> None:
    assert not names_checkpoint(engines.engine(PLAIN)) and not names_checkpoint(tmp_path / "nothing")
    assert names_checkpoint(engines.checkpoint(PLAIN)) and names_checkpoint("owner/name@main")
    with pytest.raises(BuildError, match="is none; leave them out"):
        LLM(engines.engine(PLAIN), build_options={"kv_dtype": "fp8"})
    with pytest.raises(BuildError, match="fields of BuildOptions"):
        LLM(engines.checkpoint(PLAIN), build_options={"kv_typ": "fp8"})
    with pytest.raises(EngineError, match=r"localhost:9999 is no engine; .*: give http://localhost:9999\.$"):
        check_is_there("localhost:9999")
    with pytest.raises(EngineError, match=r"nothing is not an engine directory .* or OWNER/NAME of a checkpoint"):
        LLM(tmp_path / "nothing")
    with pytest.raises(KvforgeError, match="key begins with ''"):
        remove_entry(folder, "")


def test_a_cache_that_cannot_be_written_is_a_sentence(
    checkpoint: Path, tmp_path: Path, builds: list[BuildOptions]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="set KVFORGE_ENGINE_CACHE to a writable directory"):
        cached_engine(checkpoint, folder=tmp_path / "file")


def test_options_of_a_build_need_a_checkpoint(engines: EngineShelf, capsys: pytest.CaptureFixture) -> None:
    for option, value in (("--kv-dtype", "fp8"), ("--no-early-exit", None)):
        words = ["serve", str(engines.engine(PLAIN)), *FREE_PORTS, option, *([value] if value else [])]
        assert main(words) == 1
        rebuilt = " ".join(words[2 + len(FREE_PORTS) :])
        sentence = f"{option} is fixed when building. Rebuild with kvforge build CHECKPOINT -o ENGINE {rebuilt}.\n"
        assert capsys.readouterr().err.endswith(f"is a built engine; {sentence}")


def test_options_of_a_predictor_are_refused_before_a_build(
    checkpoint: Path, builds: list[BuildOptions], capsys: pytest.CaptureFixture
) -> None:
    assert main(["serve", str(checkpoint), *FREE_PORTS, "--exact-last", "3"]) == 1
    assert "is a checkpoint, and --exact-first, --exact-last and" in capsys.readouterr().err
    assert builds == []


def test_time_of_use_is_kept(cached: CachedEngine, checkpoint: Path, folder: Path) -> None:
    os.utime(folder / cached.key / "entry.json", (1, 1))
    begun = time.time()
    cached_engine(checkpoint, folder=folder).release()
    assert list_entries(folder)[0].last_used >= begun - 1
