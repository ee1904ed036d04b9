"""A server that has no room for its files, or an engine that cannot be read: one sentence, and nothing half-written."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving.serve_process import refused_start


@pytest.fixture
def small_disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 64 KiB, or as much as the test says; its path is short enough for a socket."""
    size = getattr(request, "param", "64k")
    folder = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        folder.rmdir()
        pytest.skip("a small tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


def assert_one_sentence(status: int, errors: str, words: str) -> None:
    assert status == 1
    assert errors.startswith("kvforge: error: ") and words in errors
    assert errors.count("\n") == 1


def test_no_room_for_the_run_directory(engine_dir: Path, small_disk: Path) -> None:
    status, errors = refused_start(engine_dir, env={**os.environ, "TMPDIR": str(small_disk)})
    assert_one_sentence(status, errors, f"cannot be written to {small_disk} (No space left on device)")
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("small_disk", ["3m"], indirect=True)
def test_no_room_to_load_the_engine(engine_dir: Path, small_disk: Path, full: bool) -> None:
    if not full:
        pytest.skip("needs --full: half a minute")
    status, errors = refused_start(engine_dir, env={**os.environ, "TMPDIR": str(small_disk)})
    assert_one_sentence(status, errors, "make room in the folder for temporary files")
    assert not list(small_disk.glob("kvforge-*"))


def test_a_log_file_that_cannot_be_written(engine_dir: Path, tmp_path: Path) -> None:
    status, errors = refused_start(engine_dir, "--log-file", str(tmp_path / "none" / "log"))
    assert_one_sentence(status, errors, "--log-file")
    assert list(tmp_path.iterdir()) == []


def test_an_engine_with_a_file_missing(engine_dir: Path, tmp_path: Path) -> None:
    """Noticed when the engine loads, after tritonserver started: its sentence, and no process stays."""
    damaged = tmp_path / "engine"
    shutil.copytree(engine_dir, damaged)
    (damaged / "rank0" / "weights.safetensors").unlink()
    status, errors = refused_start(damaged)
    assert_one_sentence(status, errors, "weights.safetensors")
