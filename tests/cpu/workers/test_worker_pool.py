"""Workers that crash, hang, take memory or print: their job gets a sentence, the next job an answer."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from kvforge.workers import WorkerDied, WorkerPool, WorkersUnavailable, WorkerTimeout
from kvforge.workers.process import WorkerProcess

COMMAND = (sys.executable, str(Path(__file__).with_name("hostile.py")))
MEMORY = 256 << 20
WAIT_S = 60.0


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(COMMAND, 1, MEMORY)
    yield pool
    pool.close()


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers(pool: WorkerPool) -> None:
    assert pool.call(b"echo hello", WAIT_S) == b"hello"
    large = os.urandom(20 << 20)
    assert pool.call(b"echo " + large, WAIT_S) == large
    assert pool.call(b"", WAIT_S) == b""
    assert pool.call(b"core", WAIT_S) == b"(0, 0)"
    assert pool.call(b"pid", WAIT_S) == pool.call(b"pid", WAIT_S)


def test_what_a_job_prints_is_in_no_answer(pool: WorkerPool) -> None:
    assert pool.call(b"print", WAIT_S) == b""
    assert pool.call(b"echo next", WAIT_S) == b"next"


@pytest.mark.parametrize(
    ("job", "words", "raised"),
    [
        (b"raise", "Panic: the matcher", "Panic"),
        (b"crash", "signal 11", None),
        (b"exit", "exit status 7", None),
        (b"take 600000000", "MemoryError", "MemoryError"),
    ],
)
def test_deaths(pool: WorkerPool, job: bytes, words: str, raised: str | None) -> None:
    before = pool.call(b"pid", WAIT_S)
    with pytest.raises(WorkerDied, match=words) as found:
        pool.call(job, WAIT_S)
    assert found.value.raised == raised and "\n" not in str(found.value)
    assert pool.call(b"pid", WAIT_S) != before
    wait_gone(int(before))


@pytest.mark.parametrize("job", [b"sleep 1000", b"spin", b"stop", b"native"])
def test_a_job_beyond_its_time_is_killed(pool: WorkerPool, job: bytes) -> None:
    before = pool.call(b"pid", WAIT_S)
    with pytest.raises(WorkerTimeout):
        pool.call(job, 0.2)
    assert pool.call(b"pid", WAIT_S) != before
    wait_gone(int(before))


def test_processor_time_is_limited_apart(pool: WorkerPool) -> None:
    with pytest.raises(WorkerTimeout):
        pool.call(b"spin", WAIT_S, cpu_s=0.1)
    assert pool.call(b"sleep 0.3", WAIT_S, cpu_s=0.2) == b""
    assert pool.call(b"echo after", WAIT_S) == b"after"


def test_memory_counts_from_where_the_worker_is_ready(pool: WorkerPool) -> None:
    assert pool.call(b"take 200000000", WAIT_S) == b"200000000"


def test_answers_beyond_their_size_are_deaths() -> None:
    pool = WorkerPool(COMMAND, 1, MEMORY, max_answer_bytes=1000)
    try:
        assert len(pool.call(b"big 1000", WAIT_S)) == 1000
        with pytest.raises(WorkerDied, match="larger than 1000 bytes"):
            pool.call(b"big 1001", WAIT_S)
        assert pool.call(b"echo x", WAIT_S) == b"x"
    finally:
        pool.close()


def test_several_at_once_and_lazily() -> None:
    pool = WorkerPool(COMMAND, 2, MEMORY)
    try:
        assert pool.num_started == 0
        assert pool.call(b"echo 1", WAIT_S) == b"1"
        assert pool.num_started == 1
        slow = pool.submit(b"sleep 1000", WAIT_S)
        assert [pool.call(b"echo 2", WAIT_S) for _ in range(5)] == [b"2"] * 5
        assert pool.num_started == 2 and not slow.done()
    finally:
        pool.close()
    with pytest.raises((WorkerDied, WorkersUnavailable)):
        slow.result(WAIT_S)


def test_waiting_jobs_are_bounded_and_can_be_cancelled() -> None:
    pool = WorkerPool(COMMAND, 1, MEMORY, max_waiting=2)
    try:
        pool.call(b"", WAIT_S)
        futures = [pool.submit(b"sleep 1000", WAIT_S), *(pool.submit(b"echo x", WAIT_S) for _ in range(2))]
        with pytest.raises(WorkersUnavailable, match="3 jobs wait"):
            pool.submit(b"echo x", WAIT_S)
        assert futures[1].cancel()
        more = pool.submit(b"echo y", WAIT_S)
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            futures[0].result(WAIT_S)
        with pytest.raises(CancelledError):
            futures[1].result(WAIT_S)
        assert (futures[2].result(WAIT_S), more.result(WAIT_S)) == (b"x", b"y")
    finally:
        pool.close()


def wait_for_pid(pool: WorkerPool) -> int:
    deadline = time.monotonic() + WAIT_S
    while not pool.pids:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pool.pids[0]


def test_threads_share_a_pool(pool: WorkerPool) -> None:
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = pool.call(b"echo %d" % number, WAIT_S)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: b"%d" % number for number in range(20)}


@pytest.mark.parametrize("is_ready", [False, True])
def test_close_ends_what_runs(is_ready: bool) -> None:
    pool = WorkerPool(COMMAND, 1, MEMORY)
    if is_ready:
        pool.call(b"", WAIT_S)
    future = pool.submit(b"native", WAIT_S)
    pid = wait_for_pid(pool)
    pool.close()
    pool.close()
    wait_gone(pid)
    assert isinstance(future.exception(WAIT_S), WorkerDied | WorkersUnavailable)
    with pytest.raises(WorkersUnavailable, match="stopped"):
        pool.call(b"echo x", WAIT_S)


def test_preparations_that_fail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pool = WorkerPool((*COMMAND, str(log), "fail"), 1, MEMORY)
    try:
        for _ in range(2):
            with pytest.raises(WorkersUnavailable, match="no such tokenizer"):
                pool.call(b"echo x", WAIT_S)
    finally:
        pool.close()
    with pytest.raises(WorkersUnavailable, match="exit status 2"):
        WorkerPool((sys.executable, "/nonexistent.py"), 1, MEMORY).call(b"", WAIT_S)
    with pytest.raises(WorkersUnavailable, match="no worker process can be started"):
        WorkerPool(("/nonexistent",), 1, MEMORY).call(b"", WAIT_S)


def test_warm_prepares_all_before_the_first_job(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pool = WorkerPool((*COMMAND, str(log)), 3, MEMORY)
    try:
        for _ in range(2):
            assert [started.result(WAIT_S) for started in pool.warm()] == [True] * 3
            assert log.read_text().count("prepared") == pool.num_started == 3
        jobs = [pool.submit(b"echo %d" % number, WAIT_S) for number in range(6)]
        assert [job.result(WAIT_S) for job in jobs] == [b"%d" % number for number in range(6)]
        assert log.read_text().count("prepared") == pool.num_started == 3
    finally:
        pool.close()
    assert len(pool.warm()) == pool.num_started == 3


def test_who_waits_for_a_start_cannot_end_it(tmp_path: Path) -> None:
    pool = WorkerPool((*COMMAND, str(tmp_path / "log")), 2, MEMORY)
    try:
        assert [started.cancel() for started in pool.warm()] == [False] * 2
        assert [started.result(WAIT_S) for started in pool.warm()] == [True] * 2
        assert pool.call(b"echo x", WAIT_S) == b"x"
    finally:
        pool.close()


def test_warm_tells_what_failed(tmp_path: Path) -> None:
    pool = WorkerPool((*COMMAND, str(tmp_path / "log"), "fail"), 2, MEMORY)
    try:
        assert [started.result(WAIT_S) for started in pool.warm()] == [False, False]
        with pytest.raises(WorkersUnavailable, match="no such tokenizer"):
            pool.call(b"echo x", WAIT_S)
    finally:
        pool.close()


def test_a_start_that_fails_as_nobody_foresaw_is_told_to_the_job(monkeypatch) -> None:
    def fail(self: WorkerProcess) -> None:
        raise ValueError("a header that is none")

    pool = WorkerPool(COMMAND, 1, MEMORY)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerProcess, "wait_ready", fail)
            assert [started.result(WAIT_S) for started in pool.warm()] == [False]
            with pytest.raises(ValueError, match="a header that is none"):
                pool.submit(b"echo x", WAIT_S).result(WAIT_S)
        assert pool.call(b"echo x", WAIT_S) == b"x"
    finally:
        pool.close()


def test_no_job_waits_for_a_worker_that_is_being_started(tmp_path: Path) -> None:
    """The second worker's preparations never end; what it would have been given, the first one does."""
    log, done = tmp_path / "log", tmp_path / "done"
    pool = WorkerPool((*COMMAND, str(log), "first"), 2, MEMORY)
    try:
        pid = pool.call(b"pid", WAIT_S)
        busy = pool.submit(f"until {done}".encode(), WAIT_S)
        waiting = pool.submit(b"pid", WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while log.read_text().count("prepared") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        done.touch()
        assert (busy.result(WAIT_S), waiting.result(WAIT_S)) == (b"", pid)
    finally:
        pool.close()


OWNER = """
import sys, threading
from kvforge.workers import WorkerPool
pool = WorkerPool(sys.argv[1:3], 2, 1 << 28)
print(pool.call(b"pid", 60).decode(), flush=True)
pool.submit(sys.argv[3].encode(), 10000)
pool.submit(b"sleep 10000", 10000)
threading.Event().wait()
"""


@pytest.mark.parametrize("job", ["native", "spin", "echo x"])
def test_workers_end_with_their_parent(job: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *COMMAND, job], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_gone(pid)


def test_a_worker_that_was_killed_while_idle_is_replaced(pool: WorkerPool) -> None:
    pid = int(pool.call(b"pid", WAIT_S))
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert pool.call(b"echo x", WAIT_S) == b"x"


def test_no_descriptors_left() -> None:
    """A process that has no descriptors left says so, and serves once there are some again."""
    pool = WorkerPool(COMMAND, 1, MEMORY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Descriptors 0 to 2 are open: none below this limit is free, whatever others closed.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(WorkersUnavailable, match="no worker process can be started"):
            pool.call(b"echo x", WAIT_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert pool.call(b"echo x", WAIT_S) == b"x"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        pool.close()


def test_descriptors_are_given_back(pool: WorkerPool) -> None:
    pool.call(b"echo x", WAIT_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(WorkerDied):
            pool.call(b"exit", WAIT_S)
    pool.call(b"echo x", WAIT_S)
    assert len(os.listdir("/proc/self/fd")) == before
