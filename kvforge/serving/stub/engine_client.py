"""The stub's side of the engine process: starts it, forwards requests, replaces it when it dies or stalls."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvforge.common.errors import EngineError, RequestError, first_line
from kvforge.common.refusals import TOO_LARGE, Refusal
from kvforge.serving.engine.heartbeat import Heartbeat
from kvforge.serving.engine.output_rows import StepOutput, from_row
from kvforge.serving.engine.protocol import BLOB, Message, ProtocolError, encode, receive
from kvforge.serving.processes.facts import descendants, kill_all
from kvforge.serving.processes.run_dir import FAILED, LOADING, READY, REPLACED, STALLED
from kvforge.serving.stub.engine_queue import EngineQueue
from kvforge.serving.stub.patience import Patience

logger = logging.getLogger("kvforge.serving")

START_ATTEMPTS = 3
RETRY_S = 10.0
"""Where no engine can be started, requests have it tried again this often: a start costs seconds of processor time."""
LOOK_PERIOD_S = 0.1
STOP_GRACE_S = 5.0
END_TIMEOUT_S = 10.0
"""A killed process ends at once, unless a driver holds it; then it is left behind."""
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Defaults for the process. Its threads share the cores with Triton's and the clients': where they spin for each other
while one of them waits for a core, a step of 2 ms was seen to take 500 ms (2 cores, load 8), and 20 microseconds of
spinning (GOMP_SPINCOUNT 2000) made tokens take twice as long beside AIPerf on the same two cores. Alone on the machine,
spinning makes steps of 25 ms a third shorter (tiny model, 2 cores of a Zen 4)."""


class EngineListener(Protocol):
    """What the engine reports. Every method is called on the client's one reader thread."""

    def on_tokens(self, outputs: list[StepOutput]) -> None: ...
    def on_refused(self, request_id: str, refusal: Refusal) -> None: ...
    def on_stats(self, stats: dict) -> None: ...
    def on_lost(self, error: str) -> None:
        """The process died: every request sent before this call is gone."""


@dataclass
class Running:
    """A process, this end of its socket, and what its main thread says of itself."""

    process: subprocess.Popen
    sock: socket.socket
    heartbeat: Heartbeat
    patience: Patience
    stall: str | None = None

    def kill_stalled(self) -> None:
        """End it with its children, which may wait for each other for ever, and whoever waits for it at the socket."""
        kill_all(descendants(self.process.pid))
        self.process.kill()  # ends a stopped process too
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Ended:
    """Why a process ended, in one sentence; whether it was ever ready; whether its engine's directory has another."""

    why: str
    was_ready: bool = False
    is_replaced: bool = False


class EngineClient:
    """One engine process at a time.

    `command` is the process's argument list; `--socket-fd N` and `--heartbeat-fd N` are appended. After a death the
    process is started again, up to START_ATTEMPTS times in a row with growing pauses; requests sent meanwhile wait for
    it. When all attempts fail, `send` raises EngineError and has it tried afresh in the background, every RETRY_S. A
    process whose main thread is silent for longer than it allowed itself (allowance.py) is killed, and so replaced.
    """

    def __init__(self, command: Sequence[str], listener: EngineListener) -> None:
        self._command = list(command)
        self._listener = listener
        self._outgoing = EngineQueue()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        self._running: Running | None = None
        self._watch_lock = threading.Lock()
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._failure: Ended | None = None
        self._has_stalled = False
        self._retry_at = 0.0
        self._supervisor: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Start the process and wait until the engine is loaded. Raises EngineError with its own message."""
        threading.Thread(target=self._write, name="engine-writer", daemon=True).start()
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
        self._supervise(attempts=1)
        self._ready.wait()
        if self._failure is not None:
            raise EngineError(self._failure.why)

    @property
    def state(self) -> str:
        """One of run_dir.ENGINE_STATES. After a stall it is that until an engine is ready again."""
        failure = self._failure
        if failure is not None:
            return REPLACED if failure.is_replaced else FAILED
        if self._has_stalled:
            return STALLED
        return READY if self._sock is not None else LOADING

    @property
    def failure(self) -> str | None:
        """Why no engine can be started, in one sentence, or None."""
        failure = self._failure
        return None if failure is None else failure.why

    @staticmethod
    def encode(message: Message) -> bytes:
        """A message as `send` takes it. Raises RequestError when it is too large."""
        try:
            return encode(message)
        except ProtocolError as error:
            raise RequestError(
                f"the request is too large for the engine: {error}", "send less", code=TOO_LARGE
            ) from None

    def abort(self, request_id: str) -> None:
        """Tell the engine to give up a request, which it may not have."""
        if self._failure is None:
            self._outgoing.put(encode({"op": "abort", "id": request_id}), always=True)

    def send(self, message: bytes) -> None:
        """Queue an encoded message for the engine. Raises EngineError while no engine can be started, or it is behind
        with more than the queue holds."""
        with self._lock:
            failure = self._failure
            if failure is not None and not self._closing.is_set() and time.monotonic() >= self._retry_at:
                self._supervise(attempts=1)
        if failure is not None:
            raise EngineError(failure.why)
        self._outgoing.put(message)

    def close(self) -> None:
        """Stop the process; returns when it has ended. Idempotent."""
        self._closing.set()
        self.kill(signal.SIGTERM)
        process = self._process
        if process is not None:
            try:
                process.wait(timeout=STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._outgoing.end()
        if self._supervisor is not None:
            self._supervisor.join(timeout=STOP_GRACE_S)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)

    def _supervise(self, attempts: int) -> None:
        if self._supervisor is not None and self._supervisor.is_alive():
            return
        thread = threading.Thread(target=self._run, args=(attempts,), name="engine-supervisor", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no room for a thread, nor then for a process
            raise EngineError(f"the engine cannot be started: {error}; send the request again later") from None
        self._supervisor = thread

    def _run(self, attempts: int) -> None:
        """Keep a process alive until closed, or until `attempts` starts in a row have failed."""
        failed = 0
        while not self._closing.is_set():
            ended = self._run_process_once()
            self._ready.clear()
            if self._closing.is_set():
                return
            failed = 0 if ended.was_ready else failed + 1
            if ended.was_ready:
                attempts = START_ATTEMPTS
            gives_up = failed >= attempts or ended.is_replaced
            logger.error("%s", ended.why if gives_up else f"{ended.why}; the engine is started again")
            if gives_up:
                self._retry_at = time.monotonic() + RETRY_S
                self._failure = ended  # before the listener is told: what is sent from now on is refused, not lost
                self._has_stalled = False
            self._outgoing.clear()  # the listener ends whose they were
            self._listener.on_lost(f"{ended.why}; send the request again")
            if gives_up:
                self._ready.set()
                return
            time.sleep(0.5 * failed)

    def _run_process_once(self) -> Ended:
        """Start the process and read from it until it ends."""
        try:
            running = self._spawn()
        except Exception as error:  # without this thread nobody would ever learn of it
            return Ended(f"the engine process cannot be started: {first_line(error)}")
        process, ours = running.process, running.sock
        self._process, self._running = process, running
        was_ready, is_replaced, failure = False, False, None
        try:
            while (message := receive(ours)) is not None:
                if message["op"] == "failed":
                    failure, is_replaced = message["error"], message.get("replaced", False)
                elif message["op"] == "ready":
                    was_ready = True
                    logger.warning("the engine is ready, as process %d", process.pid)
                    self._listener.on_stats(message["stats"])
                    with self._watch_lock:
                        if running.stall is None:
                            self._failure, self._has_stalled, self._sock = None, False, ours
                    self._ready.set()
                else:
                    self._dispatch(message)
        except (OSError, ProtocolError) as error:
            failure = f"the connection to the engine process broke: {error}"
            process.kill()
        except BaseException as error:  # without this thread no request would ever end
            logger.exception("a message of the engine process could not be taken in")
            failure = f"a message of the engine process could not be taken in: {first_line(error)}"
            process.kill()
        with self._watch_lock:
            self._running = self._sock = None
            ours.close()
            running.heartbeat.close()
        status = _wait(process)
        return Ended(
            running.stall or failure or f"the engine process ended unexpectedly ({status})", was_ready, is_replaced
        )

    def _spawn(self) -> Running:
        """Raises OSError, and what Popen makes of a command that is none."""
        with contextlib.ExitStack() as undo:
            heartbeat = Heartbeat.create()
            undo.callback(heartbeat.close)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                fds = [theirs.fileno(), heartbeat.fd]
                command = [*self._command, "--socket-fd", str(fds[0]), "--heartbeat-fd", str(fds[1])]
                environment = {**ENVIRONMENT, **os.environ}
                process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=environment)
            undo.pop_all()
            return Running(process, ours, heartbeat, Patience(heartbeat.read, time.monotonic))

    def _watch(self) -> None:
        """Kill a process that is alive but does not work; its reader then learns of its end."""
        while not self._closing.wait(LOOK_PERIOD_S):
            with self._watch_lock:
                running = self._running
                if running is None or running.stall is not None or not running.patience.is_overdue():
                    continue
                running.stall = f"the engine stopped answering for {running.patience.silent_s:.0f} s and was ended"
                self._has_stalled = True
                self._sock = None
                running.kill_stalled()

    def _dispatch(self, message: Message) -> None:
        op = message["op"]
        if op == "tokens":
            blob = message.get(BLOB, b"")
            self._listener.on_tokens([from_row(row, blob) for row in message["outputs"]])
        elif op == "stats":
            self._listener.on_stats(message["stats"])
        elif op == "refused":
            self._listener.on_refused(message["id"], Refusal.from_json(message["refusal"]))

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            while not self._closing.is_set() and self._failure is None:
                sock = self._sock
                if sock is None:
                    self._ready.wait(timeout=0.1)
                    continue
                # A failed send means the process died: `on_lost` answers the request.
                with contextlib.suppress(OSError):
                    sock.sendall(message)
                break


def _wait(process: subprocess.Popen) -> str:
    """How it ended, once it has."""
    try:
        status = process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "it closed its connection, and does not end"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
