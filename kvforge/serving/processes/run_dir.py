"""A server's run directory as the launcher sees it: it asks the stub to drain, and reads what the stub says of the
engine (state_files.py is the stub's side)."""

import json
import math
import os
import shlex
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRAIN_FILE = "drain"
STATE_FILE = "state.json"
HUNG_AFTER_S = 30.0
"""A stub writes its state each second; one silent for so long will not come back."""
STALE_AFTER_S = 5.0
"""One silent for so long may not be there any more."""
READY, LOADING, STALLED, FAILED, REPLACED = ENGINE_STATES = ("ready", "loading", "stalled", "failed", "replaced")
"""`loading` for the first time or again; `stalled`, the process did not step any more and no other is ready yet;
`failed`, none can be started; `replaced`, none is, because another engine lies in the directory."""
SILENT = "the process of model 'tensorrt_llm' does not say how the engine is"
_PROBLEMS = {
    STALLED: "the engine stopped answering; it was ended and is started again",
    FAILED: "the engine cannot be started",
    REPLACED: "the engine is not started",
}


@dataclass(frozen=True)
class EngineState:
    """What the stub says of the engine, one of ENGINE_STATES. `age_s`: for how long it said nothing new; `draining`: it
    lets no more requests in, so that `active` only falls; `reason`: why the engine failed."""

    engine: str
    engine_pid: int | None
    active: int
    age_s: float
    draining: bool = False
    reason: str | None = None

    @property
    def is_frozen(self) -> bool:
        """The stub says nothing, or says that the engine said nothing: neither is dead, neither works."""
        return self.engine == STALLED or self.age_s > STALE_AFTER_S

    @property
    def problem(self) -> str | None:
        """Why a request would not be served, in a sentence, or None."""
        if self.age_s > STALE_AFTER_S:
            return SILENT
        if self.engine == READY:
            return None
        problem = _PROBLEMS.get(self.engine, f"the engine is {self.engine}")
        return problem if self.reason is None else f"{problem}: {self.reason}"


def make_run_dir() -> Path:
    """A new directory for one server's files. Raises OSError when there is no room for one."""
    # A Unix socket's path takes 107 bytes at most, Triton starts stubs by an unquoted line of a shell, and a library to
    # preload lies here, whose path ends at a colon.
    folder = tempfile.gettempdir()
    usable = len(os.fsencode(folder)) <= 60 and shlex.quote(folder) == folder and ":" not in folder
    return Path(tempfile.mkdtemp(prefix="kvforge-serve-", dir=folder if usable else "/tmp"))


def cannot_write_run_dir(error: OSError) -> str:
    """One sentence for a run directory that could not be made or filled."""
    first = error.args[0][0][2] if isinstance(error, shutil.Error) else f"{error.strerror or error}"
    why = str(first).partition(":")[0].rpartition("] ")[2]
    try:
        folder = tempfile.gettempdir()
    except OSError:  # there is none: the error says which were tried
        return f"{first}: set TMPDIR to a folder that the server's files can be written to"
    return f"the server's files cannot be written to {folder} ({why}): make room there, or set TMPDIR to another folder"


def ask_to_drain(run_dir: Path, deadline_s: float) -> None:
    """The stub refuses new requests from now on, and ends those still open after `deadline_s` with an error."""
    partial = run_dir / f"{DRAIN_FILE}.tmp"
    partial.write_text(json.dumps({"deadline_s": deadline_s}))
    partial.replace(run_dir / DRAIN_FILE)


class StateReader:
    """Reads state.json. Its age is measured by this process's monotonic clock, so clock jumps do not matter.

    From one `read` to the next at most `longest_look_s` count: whoever reads often notices by that when it did not run
    itself, and does not take the machine's standstill for the stub's silence.
    """

    def __init__(self, run_dir: Path, longest_look_s: float = math.inf) -> None:
        self._path = run_dir / STATE_FILE
        self._longest_look_s = longest_look_s
        self._last: dict[str, Any] | None = None
        self._looked_at = time.monotonic()
        self._age_s = 0.0
        self._lock = threading.Lock()

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
        with self._lock:
            now = time.monotonic()
            self._age_s += min(now - self._looked_at, self._longest_look_s)
            self._looked_at = now
            if self._last is None or value["time"] != self._last["time"]:
                self._last, self._age_s = value, 0.0
            age_s = self._age_s
        return EngineState(
            value["engine"], value["engine_pid"], value["active"], age_s, value.get("draining", False),
            value.get("reason"),
        )  # fmt: skip
