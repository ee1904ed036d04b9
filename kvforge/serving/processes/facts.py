"""Process facts from /proc, used to leave nothing behind. A pid is always kept with its start time."""

import contextlib
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

STUB = "triton_python_backend_stub"
_TRACKER = "from multiprocessing.resource_tracker import main"


@dataclass(frozen=True)
class ProcessId:
    """A process for good: pids are used again, pids with a start time (clock ticks since boot) are not."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        """False also for a zombie."""
        status = _status(self.pid)
        return status is not None and status[2] == self.start_time and status[0] not in "ZX"

    def kill(self) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def process_id(pid: int) -> ProcessId | None:
    """The process that has this pid now, or None."""
    status = _status(pid)
    return None if status is None else ProcessId(pid, status[2])


def children(pid: int) -> list[ProcessId]:
    """The processes started by `pid` itself."""
    found: list[ProcessId] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            pids = (int(word) for word in (thread / "children").read_text().split())
            found += [child for child in map(process_id, pids) if child is not None]
    return found


def descendants(pid: int) -> list[ProcessId]:
    """All processes started by `pid`, directly or not, children before grandchildren."""
    by_parent = _by_parent()
    found, frontier = [], [pid]
    while frontier:
        for child in by_parent.get(frontier.pop(0), []):
            found.append(child)
            frontier.append(child.pid)
    return found


def kill_all(processes: Iterable[ProcessId]) -> None:
    """Kill processes, all but the trackers of Python's ``multiprocessing``: such a one removes the shared memory of
    those that used it once they have ended, and then ends itself."""
    for process in processes:
        if _TRACKER not in " ".join(_words(str(process.pid))):
            process.kill()


def how_it_ended(status: int) -> str:
    """A `Popen` return code in words."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def processes_of(server_pid: int, server: ProcessId | None) -> list[ProcessId]:
    """The stubs of one tritonserver, then its engine's process, also when it has ended: by its pid on their command
    lines, because orphans have another parent. `server` is the one that is meant, None when it had ended before it was
    looked at; those of another that has the pid now, or has it in another container, are not its processes."""
    holder = process_id(server_pid)
    found = [
        (not _is_stub(words), process)
        for process, words in _processes_with(lambda words: _is_of(words, server_pid))
        if holder in (None, server) or process.start_time < holder.start_time
    ]
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def programs_below(folder: Path) -> list[ProcessId]:
    """This project's programs with a path below `folder` on their command lines: workers whose stub has ended, so that
    they have another parent."""

    def is_below(words: list[str]) -> bool:
        is_own = len(words) > 3 and words[1] == "-m" and words[2].startswith("kvforge.")
        return is_own and any(word.startswith(f"{folder}/") for word in words[3:])

    return [process for process, _ in _processes_with(is_below)]


def _processes_with(is_meant: Callable[[list[str]], bool]) -> Iterator[tuple[ProcessId, list[str]]]:
    """The processes whose command lines are meant, with these; none of another container."""
    namespace = _pid_namespace("self")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not ((words := _words(entry.name)) and is_meant(words)):
            continue
        process = process_id(int(entry.name))
        if process is not None and _pid_namespace(entry.name) == namespace:
            yield process, words


def cpu_s(pid: int) -> float:
    """Seconds of processor time that the process's threads have had; 0 where the kernel does not say."""
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended
            total += int(file.read_text().split()[0])
    return total * 1e-9


def server_of_stub() -> int:
    """The pid of the tritonserver that started this stub: not the parent's, which is another's once that has ended."""
    words = _words("self")
    return int(words[5]) if _is_stub(words) else os.getppid()


def model_of_stub(stub: ProcessId) -> str:
    """The model that a Triton Python backend process runs, by the model.py on its command line."""
    words = _words(str(stub.pid))
    return Path(words[1]).parent.parent.name if _is_stub(words) else "?"


def raise_open_files_limit() -> int:
    """Allow this process and those it starts as many open files as the system grants; every client is one. Returns
    the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _words(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _pid_namespace(pid: str) -> str | None:
    """None where the system does not say, which it does not of another user's processes."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _is_of(words: list[str], server_pid: int) -> bool:
    """A stub has the pid in its place, the engine by the arguments that the stub gives it (engine/process.py)."""
    pid = str(server_pid)
    is_engine = "--socket-fd" in words and ("--server-pid", pid) in itertools.pairwise(words)
    return is_engine or (_is_stub(words) and words[5] == pid)


def _is_stub(words: list[str]) -> bool:
    """Whether the words are program, model.py, a shared memory region, its size, its growth, tritonserver's pid, …"""
    return len(words) > 5 and Path(words[0]).name == STUB and words[1].endswith("/model.py") and words[5].isdecimal()


def _by_parent() -> dict[int, list[ProcessId]]:
    found: dict[int, list[ProcessId]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (status := _status(int(entry.name))) is not None:
            found.setdefault(status[1], []).append(ProcessId(int(entry.name), status[2]))
    return found


def wait_gone(processes: list[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait until all have ended; those that have not within the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = [process for process in processes if process.is_alive()]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def _status(pid: int) -> tuple[str, int, int] | None:
    """(state letter, parent pid, start time) from /proc/PID/stat, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[1]), int(fields[19])
