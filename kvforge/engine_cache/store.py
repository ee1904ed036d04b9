"""The folder of the cache: what is in it, and what is taken out."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.file_lock import is_free, locked
from kvforge.manifest import MANIFEST_FILE
from plugins.build import cache_dir

ENGINE = "engine"
ENTRY = "entry.json"


def cache_folder() -> Path:
    """Return ``$KVFORGE_ENGINE_CACHE``, by default the folder ``engines`` of kvforge's other cache."""
    return Path(os.environ.get("KVFORGE_ENGINE_CACHE") or cache_dir() / "engines")


@dataclass(frozen=True)
class Entry:
    """An engine of the cache. ``source`` is the checkpoint's name on the Hub or its path, ``options`` what was given
    beside the defaults; times are seconds since 1970."""

    key: str
    source: str
    options: dict[str, Any]
    checkpoint_sha256: str
    kvforge_version: str
    built: float
    last_used: float = 0.0
    num_bytes: int = 0
    engine: str = ""


def save_entry(entry: Entry, directory: Path) -> None:
    """Write what does not change of an entry beside its engine."""
    kept = {name: value for name, value in asdict(entry).items() if name not in ("last_used", "num_bytes", "engine")}
    (directory / ENTRY).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def list_entries(folder: Path) -> list[Entry]:
    """Return the engines of the cache, the last used first; what is no whole entry is left out."""
    entries = [entry for path in folder.glob(f"*/{ENTRY}") if (entry := _read(path)) is not None]
    return sorted(entries, key=lambda entry: -entry.last_used)


def remove_entry(folder: Path, name: str) -> list[Entry]:
    """Remove the engine whose key is or begins with ``name``; returns it.

    Raises:
        KvforgeError: there is no such engine or several, or a process uses it.
    """
    found = [entry for entry in list_entries(folder) if entry.key.startswith(name)]
    if len(found) != 1 or not name:
        raise KvforgeError(
            f"{folder} has {len(found)} engines whose key begins with {name!r}; kvforge cache list shows the keys."
        )
    return _remove(folder, found)


def remove_all(folder: Path) -> list[Entry]:
    """Remove all engines, what interrupted builds left, and the hashes of checkpoints; returns the engines.

    Raises:
        KvforgeError: a process uses one of them; the others are removed.
    """
    for left in folder.glob(".*.building"):
        _if_unlocked(left, shutil.rmtree)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return _remove(folder, list_entries(folder))


def _remove(folder: Path, entries: Sequence[Entry]) -> list[Entry]:
    used: list[Entry] = []
    for entry in entries:
        lock = folder / f"{entry.key}.lock"
        with locked(lock):
            if is_free(folder / entry.key / ENTRY):
                shutil.rmtree(folder / entry.key, ignore_errors=True)
                lock.unlink()
            else:
                used.append(entry)
    if used:
        keys = ", ".join(entry.key for entry in used)
        raise KvforgeError(f"{keys} cannot be removed while a process uses it; stop that, and remove it again.")
    return list(entries)


def _read(path: Path) -> Entry | None:
    directory = path.parent
    try:
        if directory.name.startswith(".") or not (directory / ENGINE / MANIFEST_FILE).is_file():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
        rest = {"last_used": path.stat().st_mtime, "num_bytes": sum(sizes), "engine": str(directory / ENGINE)}
        return Entry(**{**kept, **rest, "key": directory.name})
    except (OSError, ValueError, TypeError):  # removed meanwhile, or written by another version
        return None


def _if_unlocked(directory: Path, act: Callable[[Path], object]) -> None:
    """Call ``act`` unless a build is at work in ``directory``."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        act(directory)
    except OSError:
        pass
    finally:
        os.close(descriptor)
