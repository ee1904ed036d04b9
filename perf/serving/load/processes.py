"""What the processes behind a server use: processor time by process and memory, from /proc."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvforge.serving.processes.facts import descendants

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
ENGINE, GATEWAY, TRITON, CLIENT = "engine", "gateway", "tritonserver", "client"


def role_of(command: list[str]) -> str:
    """A short name from a process's argument list: the engine, the gateway, "stub of MODEL", tritonserver, else the
    program's name."""
    if "kvforge.serving.engine.process" in command:
        return ENGINE
    if "kvforge.gateway" in command:
        return GATEWAY
    program = Path(command[0]).name if command and command[0] else "?"
    if program == "triton_python_backend_stub" and len(command) > 1:
        return f"stub of {Path(command[1]).parent.parent.name}"
    return program


def server_processes(pid: int) -> dict[str, int]:
    """Role to pid of ``pid`` (tritonserver, or what supervises it) and all it started that run now."""
    found = {}
    for process in [pid, *(child.pid for child in descendants(pid))]:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
            found[role_of(command)] = process
    return found


@dataclass(frozen=True)
class Memory:
    """MiB: resident, and proportional (a page that n processes share counts 1/n for each)."""

    rss: float
    pss: float


def memory_of(pid: int) -> Memory | None:
    """None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return Memory(*(int(sizes[name].split()[0]) / 1024 for name in ("Rss", "Pss")))


def cpu_seconds(pid: int) -> dict[int, float]:
    """Thread id to the processor seconds, user and system, that it has used; ended threads are not in it."""
    seconds = {}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                seconds[int(thread.name)] = _used_s(thread / "stat")
    return seconds


def _used_s(stat: Path) -> float:
    text = stat.read_text()
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def total_cpu_seconds(pid: int) -> float:
    """Processor seconds, user and system, that ``pid`` and what it started have used, ended threads included, ended
    processes not."""
    total = 0.0
    for process in [pid, *(child.pid for child in descendants(pid))]:
        with contextlib.suppress(OSError):
            total += _used_s(Path(f"/proc/{process}/stat"))
    return total


class CpuWindow:
    """Processor seconds by role between its making and ``read()``; this process is the client."""

    def __init__(self, pid: int) -> None:
        self._pids = {**server_processes(pid), CLIENT: os.getpid()}
        self._before = {role: cpu_seconds(process) for role, process in self._pids.items()}

    def read(self) -> dict[str, list[float]]:
        """Role to each of its threads' seconds, busiest first; threads that used none are left out."""
        used = {}
        for role, process in self._pids.items():
            before = self._before[role]
            threads = (after - before.get(thread, 0.0) for thread, after in cpu_seconds(process).items())
            used[role] = sorted((round(seconds, 2) for seconds in threads if seconds > 0), reverse=True)
        return used
