"""A few workers of one kind, and the jobs that wait for them."""

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvforge.workers.errors import WorkersBusy, WorkersUnavailable
from kvforge.workers.process import WorkerProcess

START_TIMEOUT_S = 120.0
MAX_ANSWER_BYTES = 1 << 28
WARM_WITHIN_S = 15.0
"""How long a server that starts waits for its workers at most; it serves without those that are not ready then. Less
than what `kvforge serve` gives its parts to start (READY_FOLLOWS_S, START_TIMEOUT_S of the gateway)."""


@dataclass(frozen=True)
class _Job:
    request: bytes
    timeout_s: float
    cpu_s: float
    future: "Future[bytes]"


class WorkerPool:
    """`size` processes of `command`, which calls `kvforge.workers.serve`; a process starts with the first job that
    needs one more, and a new one takes the place of one that ended. A job goes to a process that is ready: while one
    is started, jobs are for the others.

    Args:
        memory_bytes: what a worker may take beyond what it has when it is ready.
        max_waiting: jobs that may wait for a worker; more are refused at once.
        start_timeout_s: what a worker's preparations may take.
        max_answer_bytes: of one job; a longer answer counts as a death.

    Every method may be called from any thread. The workers end when the pool is closed and when this process ends,
    however it does.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        memory_bytes: int,
        max_waiting: int = 1024,
        start_timeout_s: float = START_TIMEOUT_S,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._command = list(command)
        self._size = size
        self._memory_bytes = memory_bytes
        self._max_waiting = max_waiting
        self._start_timeout_s = start_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._started: list[Future[bool]] = []
        self._workers: dict[threading.Thread, WorkerProcess] = {}
        self._num_open = 0
        self._closed = False
        self.num_started = 0
        """Processes started so far."""

    def call(self, request: bytes, timeout_s: float, cpu_s: float = 0.0) -> bytes:
        """The answer to a job. See `submit`."""
        return self.submit(request, timeout_s, cpu_s).result()

    def submit(self, request: bytes, timeout_s: float, cpu_s: float = 0.0) -> "Future[bytes]":
        """A job that may take `timeout_s` once a worker has it, and `cpu_s` of processor time where that is not 0.

        The future can be cancelled while the job waits. It raises WorkerDied, WorkerTimeout or WorkersUnavailable;
        this method raises WorkersUnavailable where too many jobs wait.
        """
        job = _Job(request, timeout_s, cpu_s, Future())
        with self._lock:
            if self._closed:
                raise WorkersUnavailable("the workers have been stopped.")
            if self._num_open >= self._size + self._max_waiting:
                raise WorkersBusy(f"{self._num_open} jobs wait for a worker; try again.")
            if len(self._threads) < min(self._size, self._num_open + 1):
                self._add_thread()
            self._num_open += 1
            self._jobs.put(job)
        job.future.add_done_callback(self._on_done)
        return job.future

    def warm(self) -> "list[Future[bool]]":
        """Start all processes now, so that no job waits for their preparations. Does not wait: a future for each
        process tells when it is ready (True) or has failed to start (False; a job will try again). They cannot be
        cancelled.

        Raises WorkersUnavailable where not even a thread can be started.
        """
        with self._lock:
            for _ in range(0 if self._closed else self._size - len(self._threads)):
                self._add_thread()
            return list(self._started)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [worker.pid for worker in list(self._workers.values()) if worker.is_alive()]

    def close(self) -> None:
        """Kill the workers; open jobs raise WorkerDied or WorkersUnavailable. Idempotent."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._jobs.put(None)
        for worker in list(self._workers.values()):
            worker.interrupt()
        for thread in threads:
            thread.join()

    def _on_done(self, future: "Future[bytes]") -> None:
        with self._lock:
            self._num_open -= 1

    def _add_thread(self) -> None:
        # Daemons that live as long as the pool: a worker ends with the thread that started it.
        started: Future[bool] = Future()
        started.set_running_or_notify_cancel()  # else who waits for it in an event loop could cancel it
        thread = threading.Thread(target=self._run, args=(started,), name="worker-pool", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            if self._threads:
                return
            raise WorkersUnavailable(f"no worker process can be started ({error}); try again later.") from None
        self._threads.append(thread)
        self._started.append(started)

    def _run(self, started: "Future[bool]") -> None:
        """Of one thread and its worker."""
        worker = self._start_ahead()
        started.set_result(worker is not None)
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                if worker is not None and not worker.is_alive():
                    worker.kill()
                    worker = None
                if worker is None:
                    worker = self._start()
                job.future.set_result(worker.call(job.request, job.timeout_s, job.cpu_s))
            except BaseException as error:
                job.future.set_exception(error)
            if worker is not None and worker.is_spent:
                worker.kill()
                worker = self._start_ahead()
        if worker is not None:
            worker.kill()

    def _start(self) -> WorkerProcess:
        """A worker that is ready. Raises WorkersUnavailable."""
        with self._lock:  # so that none is started behind the back of `close`
            if self._closed:
                raise WorkersUnavailable("the workers have been stopped.")
            worker = WorkerProcess(self._command, self._memory_bytes, self._start_timeout_s, self._max_answer_bytes)
            self._workers[threading.current_thread()] = worker
            self.num_started += 1
        try:
            worker.wait_ready()
        except BaseException:
            worker.kill()
            raise
        return worker

    def _start_ahead(self) -> WorkerProcess | None:
        """For the next job; where it cannot be started, for whatever reason, that job tries again and is told."""
        with contextlib.suppress(Exception):
            return self._start()
        return None
