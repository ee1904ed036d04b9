"""Results on disk: a record and a log for each experiment, whole or not there.

``NAME.json`` is the last run that succeeded, ``NAME.failed.json`` a later one that did not; ``NAME.log`` and
``NAME.failed.log`` are what they printed.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.gpu.queue.experiment import Experiment, sources_digest
from perf.harness.engines import ROOT

RESULTS = ROOT / "perf" / "results" / "gpu"
NEVER, DONE, STALE, UNREADABLE = "never", "done", "stale", "unreadable"


@dataclass(frozen=True)
class State:
    """How an experiment's result is: ``kind`` is one of ``NEVER``, ``DONE``, ``STALE`` (its sources have changed since)
    and ``UNREADABLE`` (its file is no record); ``record`` is that result, ``failure`` the record of a later run that
    failed."""

    kind: str
    record: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None


def record_path(folder: Path, name: str, failed: bool = False) -> Path:
    """Return where an experiment's record lies; its log lies beside it, with the ending ``.log``."""
    return folder / f"{name}{'.failed' if failed else ''}.json"


@contextlib.contextmanager
def appearing_whole(path: Path) -> Iterator[Path]:
    """Yield where to write a file that is never seen in part: it takes the place of ``path`` when the block is left."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield hidden
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is never seen in part."""
    with appearing_whole(path) as hidden:
        hidden.write_bytes(content)


def keep(folder: Path, record: dict[str, Any], log: bytes) -> Path:
    """Write a record and its log; a success replaces an earlier failure. Returns the record's file."""
    failed = record["exit"] != 0
    path = record_path(folder, record["experiment"], failed)
    write_whole(path.with_suffix(".log"), log)
    write_whole(path, json.dumps(record, indent=0).encode() + b"\n")
    if not failed:
        earlier = record_path(folder, record["experiment"], failed=True)
        earlier.unlink(missing_ok=True)
        earlier.with_suffix(".log").unlink(missing_ok=True)
    return path


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a record; None where the file is not there or is no record."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if is_record(record) else None


def is_record(value: Any) -> bool:
    """Whether a value is a record of ``perf.gpu.queue.running``, as far as the queue reads it."""
    return isinstance(value, dict) and isinstance(value.get("sources_sha256"), str) and "exit" in value


def state_of(experiment: Experiment, folder: Path = RESULTS, root: Path = ROOT) -> State:
    """Return the state of an experiment's result in ``folder``."""
    done, failed = (record_path(folder, experiment.name, failure) for failure in (False, True))
    record, failure = read_record(done), read_record(failed)
    if record is None:
        return State(UNREADABLE if done.exists() else NEVER, None, failure)
    is_current = record["sources_sha256"] == sources_digest(experiment, root)
    return State(DONE if is_current else STALE, record, failure)


def commit_of(path: Path, root: Path = ROOT) -> str | None:
    """Return the short hash of a file's last commit; None where it is in none."""
    try:
        found = subprocess.run(
            ["git", "log", "-1", "--format=%h", "--", str(path)], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return found.stdout.strip() or None
