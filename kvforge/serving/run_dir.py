"""A server's run directory as the launcher sees it: it asks the stub to drain, and reads what the stub says of the
engine (state_files.py is the stub's side)."""

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRAIN_FILE = "drain"
STATE_FILE = "state.json"
HUNG_AFTER_S = 30.0
"""A stub writes its state each second; one silent for so long will not come back."""


@dataclass(frozen=True)
class EngineState:
    """What the stub says of the engine: ready, loading, failed or lost. `age_s`: for how long it said nothing new;
    `draining`: it lets no more requests in, so that `active` only falls."""

    engine: str
    engine_pid: int | None
    active: int
    age_s: float
    draining: bool = False


def make_run_dir() -> Path:
    """A new directory for one server's files. Raises OSError when there is no room for one."""
    # A Unix socket's path takes 107 bytes at most, so a long $TMPDIR cannot be used.
    parent = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 60 else None
    return Path(tempfile.mkdtemp(prefix="kvforge-serve-", dir=parent))


def cannot_write_run_dir(error: OSError) -> str:
    """One sentence for a run directory that could not be made or filled."""
    first = error.args[0][0][2] if isinstance(error, shutil.Error) else f"{error.strerror or error}"
    why = str(first).partition(":")[0].rpartition("] ")[2]
    return (
        f"the server's files cannot be written to {tempfile.gettempdir()} ({why}): make room there, or set TMPDIR to "
        "another folder"
    )


def ask_to_drain(run_dir: Path, deadline_s: float) -> None:
    """The stub refuses new requests from now on, and ends those still open after `deadline_s` with an error."""
    partial = run_dir / f"{DRAIN_FILE}.tmp"
    partial.write_text(json.dumps({"deadline_s": deadline_s}))
    partial.replace(run_dir / DRAIN_FILE)


class StateReader:
    """Reads state.json. Its age is measured by this process's monotonic clock, so clock jumps do not matter."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATE_FILE
        self._last: dict[str, Any] | None = None
        self._last_change = time.monotonic()

    def read(self) -> EngineState | None:
        """None when the stub has not written anything yet, or the run directory is gone."""
        try:
            value = json.loads(self._path.read_text())
        except OSError:
            return None
        except ValueError:
            value = self._last  # half written, on a full disk
        if value is None:
            return None
        now = time.monotonic()
        if self._last is None or value["time"] != self._last["time"]:
            self._last, self._last_change = value, now
        age_s = now - self._last_change
        return EngineState(value["engine"], value["engine_pid"], value["active"], age_s, value.get("draining", False))
