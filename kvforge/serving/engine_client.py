"""The stub's side of the engine process: starts it, forwards requests, restarts it when it dies."""

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from kvforge.errors import EngineError, RequestError, first_line
from kvforge.serving.output_rows import News, from_row
from kvforge.serving.protocol import BLOB, Message, ProtocolError, encode, receive

logger = logging.getLogger("kvforge.serving")

START_ATTEMPTS = 3
STOP_GRACE_S = 5.0
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Defaults for the process. Its threads share the cores with Triton's: where they spin for each other while one
of them waits for a core, a step of 2 ms was seen to take 500 ms (2 cores, load 8); passive waiting, none."""


class EngineListener(Protocol):
    """What the engine reports. Every method is called on the client's one reader thread."""

    def on_tokens(self, outputs: list[News]) -> None: ...
    def on_refused(self, request_id: str, error: str) -> None: ...
    def on_stats(self, stats: dict) -> None: ...
    def on_lost(self, error: str) -> None:
        """The process died: every request sent before this call is gone."""


class EngineClient:
    """One engine process at a time.

    `command` is the process's argument list; `--socket-fd N` is appended. After a death the process is
    started again, up to START_ATTEMPTS times in a row with growing pauses; requests sent meanwhile wait for
    it. When all attempts fail, `send` raises EngineError and tries afresh in the background.
    """

    def __init__(self, command: Sequence[str], listener: EngineListener) -> None:
        self._command = list(command)
        self._listener = listener
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        self._ready = threading.Event()
        self._closing = False
        self._failure: str | None = None
        self._supervisor: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Start the process and wait until the engine is loaded. Raises EngineError with its own message."""
        threading.Thread(target=self._write, name="engine-writer", daemon=True).start()
        self._supervise(attempts=1)
        self._ready.wait()
        if self._failure is not None:
            raise EngineError(self._failure)

    @property
    def state(self) -> str:
        """ "ready", "loading" (for the first time or again), or "failed": no engine can be started."""
        if self._failure is not None:
            return "failed"
        return "ready" if self._sock is not None else "loading"

    @staticmethod
    def encode(message: Message) -> bytes:
        """A message as `send` takes it. Raises RequestError when it is too large."""
        try:
            return encode(message)
        except ProtocolError as error:
            raise RequestError(f"the request is too large for the engine: {error}") from None

    def abort(self, request_id: str) -> None:
        """Tell the engine to give up a request, which it may not have."""
        with contextlib.suppress(EngineError):
            self.send(encode({"op": "abort", "id": request_id}))

    def send(self, message: bytes) -> None:
        """Queue an encoded message for the engine. Raises EngineError while no engine can be started."""
        with self._lock:
            failure = self._failure
            if failure is not None and not self._closing:
                self._supervise(attempts=1)
        if failure is not None:
            raise EngineError(failure)
        self._outgoing.put(message)

    def close(self) -> None:
        """Stop the process; returns when it has ended. Idempotent."""
        self._closing = True
        self.kill(signal.SIGTERM)
        process = self._process
        if process is not None:
            try:
                process.wait(timeout=STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._outgoing.put(None)
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
        self._supervisor = threading.Thread(target=self._run, args=(attempts,), name="engine-supervisor", daemon=True)
        self._supervisor.start()

    def _run(self, attempts: int) -> None:
        """Keep a process alive until closed, or until `attempts` starts in a row have failed."""
        failed = 0
        while not self._closing:
            was_ready, why = self._run_process_once()
            self._ready.clear()
            if self._closing:
                return
            failed = 0 if was_ready else failed + 1
            if was_ready:
                attempts = START_ATTEMPTS
            logger.error("%s", why if failed >= attempts else f"{why}; the engine is started again")
            if failed >= attempts:
                self._failure = why  # before the listener is told: what is sent from now on is refused, not lost
            self._listener.on_lost(f"{why}; send the request again")
            if failed >= attempts:
                self._ready.set()
                return
            time.sleep(0.5 * failed)

    def _run_process_once(self) -> tuple[bool, str]:
        """Start the process and read from it until it ends: (was it ever ready, one sentence why it ended)."""
        try:
            process, ours = self._spawn()
        except OSError as error:
            return False, f"the engine process cannot be started: {error}"
        self._process = process
        was_ready, failure = False, None
        try:
            while (message := receive(ours)) is not None:
                if message["op"] == "failed":
                    failure = message["error"]
                elif message["op"] == "ready":
                    was_ready = True
                    logger.warning("the engine is ready, as process %d", process.pid)
                    self._listener.on_stats(message["stats"])
                    self._failure = None
                    self._sock = ours
                    self._ready.set()
                else:
                    self._dispatch(message)
        except (OSError, ProtocolError) as error:
            failure = f"the connection to the engine process broke: {error}"
            process.kill()
        except Exception as error:  # without this thread no request would ever end
            logger.exception("a message of the engine process could not be taken in")
            failure = f"a message of the engine process could not be taken in: {first_line(error)}"
            process.kill()
        self._sock = None
        ours.close()
        status = process.wait()
        if failure is not None:
            return was_ready, failure
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return was_ready, f"the engine process ended unexpectedly ({how})"

    def _spawn(self) -> tuple[subprocess.Popen, socket.socket]:
        """The process and this end of its socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [*self._command, "--socket-fd", str(theirs.fileno())]
                environment = {**ENVIRONMENT, **os.environ}
                return subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
                ), ours
        except OSError:
            ours.close()
            raise

    def _dispatch(self, message: Message) -> None:
        op = message["op"]
        if op == "tokens":
            blob = message.get(BLOB, b"")
            self._listener.on_tokens([from_row(row, blob) for row in message["outputs"]])
        elif op == "stats":
            self._listener.on_stats(message["stats"])
        elif op == "refused":
            self._listener.on_refused(message["id"], message["error"])

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            while not self._closing and self._failure is None:
                sock = self._sock
                if sock is None:
                    self._ready.wait(timeout=0.1)
                    continue
                # A failed send means the process died: `on_lost` answers the request.
                with contextlib.suppress(OSError):
                    sock.sendall(message)
                break
