"""The worker's side: answers jobs one after another, until its parent goes away or one job ends it."""

import io
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kvforge.common.child_process import end_with_parent
from kvforge.workers.frames import ANSWER, DONE, FAILED, JOB, LAST, READY, SETUP

GRACE_S = 1.0
"""After a job's time the parent kills; this much later the kernel does, where the parent is gone or stopped."""
NICENESS = 5

Handler = Callable[[bytes], bytes]


def serve(prepare: Callable[[], Handler]) -> None:
    """Answer jobs with the function that `prepare` returns; returns when the parent closes its end.

    What `prepare` loads does not count for the memory limit. An exception of a job ends the worker: what native code
    raised may have left locks held, and what is out of memory may not get it back. Standard output and input are
    the jobs' no more.
    """
    requests, answers = _take_over_pipes()
    _give_way()
    (memory_bytes,) = SETUP.unpack(_read_job(requests) or b"\0" * SETUP.size)
    try:
        handle = prepare()
    except BaseException as error:
        _answer(answers, FAILED, _in_words(error))
        return
    _set_timers(0, 0)
    start_bytes = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (start_bytes + memory_bytes,) * 2)
    _answer(answers, READY, b"")
    while (request := _read_job(requests)) is not None:
        try:
            answer = handle(request)
        except BaseException as error:
            _answer(answers, FAILED, _in_words(error))
            return
        _set_timers(0, 0)
        # Where much of it stays taken, the next job gets a fresh worker and so all the memory that it may take.
        del request
        is_last = _address_space() > start_bytes + len(answer) + memory_bytes // 4
        _answer(answers, LAST if is_last else DONE, answer)
        if is_last:
            return


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes under descriptors of their own, so that nothing printed gets into an answer."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    sys.stdin = io.StringIO()
    return requests, answers


def _give_way() -> None:
    """End with the thread that started this process, leave no core file, let the parent go first."""
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)


def _read_job(requests: BinaryIO) -> bytes | None:
    """The next payload, with its timers set; None when the parent has closed its end."""
    header = requests.read(JOB.size)
    if len(header) < JOB.size:
        return None
    wall_s, cpu_s, size = JOB.unpack(header)
    _set_timers(wall_s, cpu_s)
    payload = requests.read(size)
    return payload if len(payload) == size else None


def _set_timers(wall_s: float, cpu_s: float) -> None:
    """The kernel ends the process when they run out, whoever holds the interpreter's lock; 0 stops one."""
    signal.setitimer(signal.ITIMER_REAL, wall_s + GRACE_S if wall_s else 0)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _answer(answers: BinaryIO, kind: int, payload: bytes) -> None:
    answers.write(ANSWER.pack(kind, len(payload)))
    answers.write(payload)
    answers.flush()


def _in_words(error: BaseException) -> bytes:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".encode("utf-8", "replace")


def _address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
