"""Engines and checkpoints for tests, built once for all that share their sources.

They lie in ``$KVFORGE_CACHE`` below a digest of the sources that decide them, so that both processes of a run, the next
run and another clone of the same tree find them. ``python -m tests.support.models.shelf`` builds what is missing of
``engines.py``, several at once, and says how long it took.
"""

import functools
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from kvforge.common.errors import EngineError
from kvforge.common.hardware import cpu_isa
from kvforge.compiler import build_engine
from kvforge.manifest import load_manifest, verify_files
from plugins.build import cache_dir
from tests.support.models.engines import SHARED, EngineSpec

ROOT = Path(__file__).resolve().parents[3]
BUILT_FROM = (
    "kvforge/checkpoint",
    "kvforge/common",
    "kvforge/compiler",
    "kvforge/costs",
    "kvforge/kv_policies",
    "kvforge/manifest",
    "kvforge/tasks",
    "kvforge/tensorrt",
    "kvforge/tokenization",
    "kvforge/version.py",
    "kvforge/vllm_engine",
    "kvforge/vllm_models",
    "model_defs",
    "plugins",
    "tests/support/models/checkpoints.py",
)
"""The sources that decide what an engine is; they import nothing of the product's others (tests/cpu/structure)."""

MAX_FOLDERS = 6
"""Shelves that are kept, the last used."""
RUN_BYTES = 2_000_000_000
"""A run on a machine that has nothing yet wrote 1.2 GB of temporary files, most of them Inductor's, and 0.5 GB here."""
UNUSED_S = 6 * 3600
"""No run takes so long: who may be using a shelf keeps it."""


def source_files() -> list[Path]:
    """Return the files of BUILT_FROM, sorted; model weights are none."""
    found = [
        file for name in BUILT_FROM for file in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])
    ]
    return sorted(file for file in found if file.suffix in (".py", ".cpp", ".h", ".json"))


@functools.cache
def shared_folder() -> Path:
    """Return where the engines of this tree are kept, made if it is new; shelves used long ago are removed."""
    digest = hashlib.sha256()
    for file in source_files():
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    versions = (torch.__version__, importlib.metadata.version("transformers"), sys.version_info[:2], cpu_isa())
    digest.update(repr(versions).encode())
    folder = cache_dir() / "test-engines" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for old in sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)[MAX_FOLDERS:]:
        if old.stat().st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(old, ignore_errors=True)
    return folder


class EngineShelf:
    """Builds engines on demand in one folder, which processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self, spec: EngineSpec) -> Path:
        """Return the checkpoint directory of ``spec``; where transformers, which makes it, is missing, skip."""
        pytest.importorskip("transformers", reason="checkpoints for tests are made with transformers")
        from tests.support.models.checkpoints import make_checkpoint

        path = self.folder / f"{spec.key}-checkpoint"
        with FileLock(f"{path}.lock"):
            if path.exists():
                return path
            half = path.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            dtype = torch.bfloat16 if spec.bfloat16 else torch.float32
            make_checkpoint(
                half,
                spec.family,
                cut=spec.cut,
                group_size=spec.group_size,
                early_exit=spec.early_exit,
                dtype=dtype,
                seed=spec.seed,
                **dict(spec.model),
            )
            half.rename(path)
        return path

    def engine(self, spec: EngineSpec) -> Path:
        """Return the engine directory of ``spec``."""
        path = self.folder / spec.key
        with FileLock(f"{path}.lock"):
            if not is_whole(path):
                build_engine(self.checkpoint(spec), path, spec.options, overwrite=True)
        return path


_WHOLE: set[Path] = set()


def is_whole(engine: Path) -> bool:
    """Whether an engine is there and as it was built, at this process's first look."""
    if engine not in _WHOLE:
        try:
            verify_files(engine, load_manifest(engine))
        except EngineError:
            return False
        _WHOLE.add(engine)
    return True


def _end_with_parent() -> None:
    """Of a worker: else it builds on when its parent is killed."""
    if parent := parent_process():
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _build(spec: EngineSpec) -> float:
    begun = time.monotonic()
    try:
        EngineShelf(shared_folder()).engine(spec)
    except (KeyboardInterrupt, SystemExit):
        os._exit(1)  # the pool would take it for an answer and build the next
    return time.monotonic() - begun


def build_missing(specs: Iterable[EngineSpec]) -> str:
    """Build what the shelf lacks of ``specs`` in as many processes as there are cores; return what was done."""
    begun = time.monotonic()
    missing = [spec for spec in specs if not is_whole(shared_folder() / spec.key)]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _end_with_parent) as pool:
        seconds = list(pool.map(_build, missing))
    took = f"{time.monotonic() - begun:.0f} s ({sum(seconds):.0f} s of builds)"
    return f"engines for tests: {len(missing)} built in {took}, in {shared_folder()}"


def lack_of_space() -> str | None:
    """Return what is wrong where a run of all tests has too little room."""
    for variable, folder in (("TMPDIR", Path(tempfile.gettempdir())), ("KVFORGE_CACHE", cache_dir())):
        there = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(there).free
        if free < RUN_BYTES:
            return (
                f"{folder} has {free / 1e9:.1f} GB left and the tests write up to {RUN_BYTES / 1e9:.1f}; make room, or "
                f"set {variable} to a folder with more."
            )
    return None


if __name__ == "__main__":
    if lack := lack_of_space():
        sys.exit(lack)
    try:
        shared_folder()
    except OSError as error:
        sys.exit(f"{cache_dir()} cannot be written ({error.strerror}); set KVFORGE_CACHE to a writable directory.")
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}  # of builds
    try:
        print(build_missing(SHARED))
    except KeyboardInterrupt:
        sys.exit("Interrupted; the engines that are whole are kept.")
