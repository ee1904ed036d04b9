"""Runs experiments one after the other, each in a process with a limit of its own.

A record and a log are in the folder of results the moment an experiment ends. What the running one prints goes straight
into ``OUT/running.log``, and its rows so far into ``OUT/running.json``, so that both outlive a killed queue.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from perf.gpu.carry.contents import CONTENTS
from perf.gpu.queue.bundle import BUNDLE, write_bundle
from perf.gpu.queue.experiment import Experiment, sources_digest
from perf.gpu.queue.packages import PACKAGES, keep_packages
from perf.gpu.queue.results import keep
from perf.harness.engines import ROOT

RUNNING_LOG, RUNNING_JSON = "running.log", "running.json"
TO_WRITE_S = 3.0
"""Kept free at the end, for records."""
KILLED = -int(signal.SIGKILL)
LOG_BYTES = 200_000
"""Of a longer log the end is kept."""


def run_one(
    experiment: Experiment, out: Path, limit_s: float, card: str, tiny: bool, carried: Path | None = None
) -> tuple[dict[str, Any], bytes]:
    """Run one experiment, ended after ``limit_s``; returns its record and the end of its log.

    What it needs of ``carried`` is on its PYTHONPATH, or stands in its arguments. The program is told by ``--json``
    where its report goes.
    """
    log, report = out / RUNNING_LOG, out / RUNNING_JSON
    report.unlink(missing_ok=True)
    command = [word.format(carried=carried) for word in experiment.command(tiny)]
    packages = [carried / name for name in experiment.carried if CONTENTS[name].is_path] if carried else []
    path = os.pathsep.join(map(str, [ROOT, *packages, *filter(None, [os.environ.get("PYTHONPATH")])]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    digest, start = sources_digest(experiment), time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "perf.gpu.queue.child", str(os.getpid()), *command, "--json", str(report)], cwd=ROOT,
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            process.wait(max(limit_s, 0.1))
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(ProcessLookupError):  # nothing is left of its group, or it had none yet
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    record = {
        "experiment": experiment.name, "question": experiment.question, "command": f"python -m {' '.join(command)}",
        "card": card, "date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - start, 1),
        "exit": process.returncode, "sources_sha256": digest, "report": read_report(report),
    }  # fmt: skip
    if record["exit"] == 0 and record["report"] is None:
        record["exit"] = 1  # a program that says nothing has not answered
    return record, log.read_bytes()[-LOG_BYTES:]


def read_report(path: Path) -> Any:
    """Return what a program has written so far; None where that is nothing that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def told(record: dict[str, Any]) -> str:
    """Return a line about a run that has ended."""
    outcome = "done" if record["exit"] == 0 else "cut off" if record["exit"] == KILLED else f"exit {record['exit']}"
    return f"{record['experiment']}: {outcome} in {record['seconds']:.0f} s"


def run_queue(
    experiments: Sequence[Experiment],
    seconds: float,
    out: Path,
    folder: Path,
    card: str,
    tiny: bool = False,
    carried: Path | None = None,
) -> list[dict[str, Any]]:
    """Run the experiments in order and return their records. One that the time left cannot hold is left out, with a
    line that says so; a later, shorter one may still run.

    Raises:
        KvforgeError: ``out`` or ``folder`` cannot be written, or has another queue running in it.
    """
    deadline = time.monotonic() + seconds
    folders = {out.resolve(): "--out"} | {folder.resolve(): "--results"}
    with contextlib.ExitStack() as held:
        for each, option in folders.items():
            held.enter_context(_held(each, option))
        return _run_all(experiments, deadline, out, folder, card, tiny, carried)


@contextlib.contextmanager
def _held(folder: Path, option: str) -> Iterator[None]:
    """Make a folder and keep other queues out of it: two would take each other's reports for their own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise KvforgeError(f"{folder} cannot be written ({error}); give another folder with {option}.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or this process is killed
    except BlockingIOError:
        os.close(handle)
        raise KvforgeError(f"another queue runs in {folder}; wait for it, or give another with {option}.") from None
    try:
        yield
    finally:
        os.close(handle)


def _run_all(
    experiments: Sequence[Experiment],
    deadline: float,
    out: Path,
    folder: Path,
    card: str,
    tiny: bool,
    carried: Path | None,
) -> list[dict[str, Any]]:
    records = []
    for experiment in experiments:
        left = deadline - time.monotonic() - TO_WRITE_S
        if left < experiment.seconds:
            print(f"{experiment.name}: not begun, {max(left, 0):.0f} s are left of {experiment.seconds}", flush=True)
            continue
        print(f"{experiment.name}: begins, {experiment.seconds} s expected", flush=True)
        record, log = run_one(experiment, out, min(experiment.limit_s, left), card, tiny, carried)
        if not _is_written(keep, folder, record, log):
            record["exit"] = record["exit"] or 1  # the next queue does not know that it ran
        _is_written(write_bundle, out / BUNDLE, folder)
        if not tiny:
            _is_written(_keep_packages, out / PACKAGES)
        records.append(record)
        print(told(record), flush=True)
        if record["exit"] != 0:
            print(*(f"    {line}" for line in log.decode(errors="replace").splitlines()[-15:]), sep="\n", flush=True)
    return records


def _is_written(write: Callable[..., Any], path: Path, *content: Any) -> bool:
    """Whether a file could be written; where not, a line says why, and the queue goes on."""
    try:
        write(path, *content)
    except OSError as error:
        print(f"{path} cannot be written ({error}); make room", flush=True)
        return False
    return True


def _keep_packages(path: Path) -> None:
    for name in keep_packages(path, Path(tempfile.gettempdir())):
        print(f"{name}: too large for {PACKAGES}", flush=True)
