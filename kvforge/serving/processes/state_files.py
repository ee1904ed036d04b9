"""Two files in the server's run directory: `state.json` says how the engine is, `drain` asks it to finish."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from kvforge.serving.processes.run_dir import DRAIN_FILE, STATE_FILE

REFRESH_S = 1.0
LENGTH = 4096
"""Bytes of the file, whatever it says, so that it can be overwritten in place."""
MAX_REASON = 300
"""Characters, which take at most six bytes each."""


class StateWriter:
    """Writes `state.json`: {engine, engine_pid, active, draining, reason, since, time}; `engine` is one of
    run_dir.ENGINE_STATES, `reason` says why there is none, or is null.

    Times are seconds since 1970; `since` is when `engine` changed, `active` the number of open requests, `draining`
    that no more are let in. The file is replaced as a whole, when something changed and at least every REFRESH_S, so
    that an old `time` says that the process which writes it is gone or stuck.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATE_FILE
        self._written: dict[str, Any] = {}

    def write(
        self, engine: str, engine_pid: int | None, active: int, draining: bool = False, reason: str | None = None
    ) -> None:
        """Called often, from one thread; writes when it is due. A full disk is no reason to end, nor to look dead:
        the file is then overwritten in its own place, which takes no room, and a reader may find half of it."""
        now = time.time()
        old = self._written
        since = old.get("since", now) if old.get("engine") == engine else now
        said: dict[str, Any] = {"engine": engine, "engine_pid": engine_pid, "active": active, "draining": draining}
        said["reason"] = None if reason is None else reason[:MAX_REASON]
        state = {**said, "since": since, "time": now}
        same = all(old.get(name) == value for name, value in said.items())
        if same and abs(now - old.get("time", 0.0)) < REFRESH_S:
            return
        draft = self._path.with_name(f"{STATE_FILE}.{os.getpid()}")
        text = json.dumps(state).ljust(LENGTH)
        try:
            try:
                draft.write_text(text)
                draft.replace(self._path)
            except OSError:
                with self._path.open("r+") as old_file:
                    old_file.write(text)
        except OSError:
            return
        self._written = state


class DrainClock:
    """Looks for the `drain` file. `asked`: it was there."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._allowed_s: float | None = None
        self._until = math.inf

    @property
    def asked(self) -> bool:
        return self._allowed_s is not None

    def look(self, now: float) -> bool:
        """Whether the time that open requests had is over at `now`, of time.monotonic."""
        allowed_s = drain_deadline(self._run_dir)
        if allowed_s is not None and allowed_s != self._allowed_s:
            self._allowed_s, self._until = allowed_s, now + allowed_s
        return now >= self._until


def drain_deadline(run_dir: Path) -> float | None:
    """Seconds that open requests may still run, from the `drain` file's {deadline_s}; None when there is none."""
    try:
        return max(0.0, float(json.loads((run_dir / DRAIN_FILE).read_text())["deadline_s"]))
    except FileNotFoundError:
        return None
    except OSError:  # such as no file descriptor for a moment: it is read again soon
        return None
    except (ValueError, KeyError, TypeError):
        return 0.0
