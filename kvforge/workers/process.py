"""One worker process from the parent's side."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence

from kvforge.workers.errors import WorkerDied, WorkersUnavailable, WorkerTimeout
from kvforge.workers.frames import ANSWER, DONE, JOB, LAST, READY, SETUP

_PIECE = 1 << 20
_END_TIMEOUT_S = 10.0


class WorkerProcess:
    """Started by the constructor, which returns at once; it ends with the thread that started it, or by `kill`.

    Raises WorkersUnavailable where no process can be made (limits of processes, descriptors, memory).
    """

    def __init__(
        self, command: Sequence[str], memory_bytes: int, start_timeout_s: float, max_answer_bytes: int
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self.is_spent = False
        try:
            self._process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except (OSError, MemoryError) as error:
            raise WorkersUnavailable(f"no worker process can be started ({error}); try again later.") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._setup = SETUP.pack(memory_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Have it prepare itself, and wait for that: once, before the first job. Raises WorkersUnavailable where it
        fails or takes too long."""
        try:
            kind, payload = self._exchange(self._setup, self._start_timeout_s, 0.0)
        except (WorkerDied, WorkerTimeout) as error:
            raise WorkersUnavailable(f"a worker process did not start: {error}") from None
        if kind != READY:
            raise WorkersUnavailable(f"a worker process did not start ({payload.decode('utf-8', 'replace')}).")

    def call(self, request: bytes, timeout_s: float, cpu_s: float) -> bytes:
        """Its answer. Raises WorkerDied or WorkerTimeout. Where it is spent afterwards, it must not be used again."""
        self.is_spent = True
        kind, payload = self._exchange(request, timeout_s, cpu_s)
        self.is_spent = kind != DONE
        if kind not in (DONE, LAST):
            words = payload.decode("utf-8", "replace")
            raise WorkerDied(f"the job failed ({words}).", words.partition(":")[0])
        return payload

    def interrupt(self) -> None:
        """End what it does; for a thread other than that which uses it."""
        self._process.kill()

    def kill(self) -> None:
        """End it and wait for that. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, payload: bytes, wall_s: float, cpu_s: float) -> tuple[int, bytes]:
        deadline = time.monotonic() + wall_s
        self._write(JOB.pack(wall_s, cpu_s, len(payload)), deadline)
        self._write(payload, deadline)
        kind, size = ANSWER.unpack(self._read(ANSWER.size, deadline))
        if size > self._max_answer_bytes:
            raise WorkerDied(f"the job's answer of {size} bytes is larger than {self._max_answer_bytes} bytes.")
        return kind, self._read(size, deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in, view[:_PIECE]) :]
            except BrokenPipeError:
                raise self._death() from None

    def _read(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            self._wait(self._out, select.POLLIN, deadline)
            part = os.read(self._out, min(size, _PIECE))
            if not part:
                raise self._death()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()  # not select: descriptors above 1023
        poll.register(descriptor, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise WorkerTimeout("the job took longer than it may.")

    def _death(self) -> WorkerDied | WorkerTimeout:
        """What to say of a worker that closed its pipes."""
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return WorkerDied("the worker closed its pipes.")
        if -status in (signal.SIGALRM, signal.SIGPROF):
            return WorkerTimeout("the job took longer than it may.")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return WorkerDied(f"the worker ended ({how}).")
