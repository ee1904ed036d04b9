"""Starts and stops a Triton server for one engine: `with TritonServer(engine_dir) as server: ...`."""

import contextlib
import dataclasses
import logging
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from kvforge.common.addresses import Address, find_address
from kvforge.common.errors import KvforgeError
from kvforge.manifest import Manifest, load_manifest
from kvforge.serving.engine.command import process_command
from kvforge.serving.health.probe import NoAnswerError, generate, has_metrics, is_ready
from kvforge.serving.logs.lines import error_in_log, failure_in_log
from kvforge.serving.logs.pump import LogPump, LogSink
from kvforge.serving.processes.cleanup import ServerResources
from kvforge.serving.processes.facts import (
    ProcessId,
    children,
    cpu_s,
    descendants,
    how_it_ended,
    kill_all,
    model_of_stub,
    process_id,
    processes_of,
    programs_below,
    raise_open_files_limit,
    wait_gone,
)
from kvforge.serving.processes.listeners import accepts, listened_ports
from kvforge.serving.processes.priority import yield_to_engine
from kvforge.serving.processes.run_dir import (
    FAILED,
    HUNG_AFTER_S,
    LOADING,
    EngineState,
    StateReader,
    cannot_write_run_dir,
    make_run_dir,
)
from kvforge.serving.processes.stacks import ask
from kvforge.serving.server.access import PRIVATE_UMASK, closed_control_apis, make_regions_private
from kvforge.serving.server.drain import drain
from kvforge.serving.server.options import ServerOptions
from kvforge.serving.server.ports import choose_ports
from kvforge.serving.server.repository import ENGINE_LINK, MODELS, materialise
from kvforge.serving.server.start_errors import PortTakenError, StartBrokeOffError, StartCancelled, did_not_start
from kvforge.serving.server.triton_addresses import FRONTENDS, address_arguments
from kvforge.serving.server.triton_install import TritonInstall, find_triton
from kvforge.serving.server.triton_waits import with_waits

logger = logging.getLogger("kvforge.serve")

START_TIMEOUT_S = 180.0
"""Until the engine's stub says that it loads the engine; how long that takes is the stub's affair."""
READY_FOLLOWS_S = 60.0
"""From the end of loading until the server is ready."""
END_TIMEOUT_S = 30.0
"""Killed processes end at once, but for a machine that is busy or gives back much memory."""
LOG_TIMEOUT_S = 10.0
"""What a log gets to be read to its end, which comes when all that write it have ended."""
LONGEST_LOOK_S = 1.0
"""Between two looks at the stub's state, which are several a second while this process runs."""
SERVER_FOLLOWS_S = 0.5
"""From the end of a stub to that of the server that it ended with."""
START_ATTEMPTS = 3
"""A busy machine makes tritonserver give up or stand still now and then, also twice in a row."""
ENDED_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals after which tritonserver is not started once more: it did not crash, somebody or the system ended it."""
PORT_ATTEMPTS = 3
"""Another process may take a free port before tritonserver listens on it, which it does once its models are loaded."""


class TritonServer:
    """One server process with its stubs and its engine process; all of them end with `stop()`.

    Only the engine that `options.manifest_sha256` names is served, or without it the one that is there at the start; it
    runs by `options.engine_command`, or without that by that of its target. Raises KvforgeError from `start()` when the
    engine directory is none, a port is taken, there is no tritonserver, or the models do not load.
    """

    def __init__(self, engine_dir: str | Path, options: ServerOptions | None = None) -> None:
        self.engine_dir = Path(engine_dir).resolve()
        self.options = options or ServerOptions()
        self._process: subprocess.Popen | None = None
        self._server_id: ProcessId | None = None
        self._run_dir: Path | None = None
        self._state: StateReader | None = None
        self._sink: LogSink | None = None
        self._log: LogPump | None = None
        self._shm_prefix = ""
        self._stubs: dict[ProcessId, str] = {}
        self.addresses: dict[str, Address] = {}
        self.ports: dict[str, int] = {}

    @property
    def http_url(self) -> str:
        return f"http://{self._reached('http')}"

    @property
    def grpc_url(self) -> str:
        return self._reached("grpc")

    @property
    def metrics_url(self) -> str:
        return f"http://{self._reached('metrics')}/metrics"

    @property
    def pid(self) -> int:
        """The tritonserver process. Raises RuntimeError when none runs."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def shm_prefix(self) -> str:
        """What the names of this server's regions in /dev/shm begin with."""
        return self._shm_prefix

    @property
    def run_dir(self) -> Path:
        """Where its files are. Raises RuntimeError when none runs."""
        if self._run_dir is None:
            raise RuntimeError("the server is not running")
        return self._run_dir

    @property
    def state(self) -> EngineState | None:
        """What the `tensorrt_llm` stub says of the engine, or None when it says nothing."""
        reader = self._state  # once: `stop` on another thread drops it
        return None if reader is None else reader.read()

    def start(self, cancelled: Callable[[], bool] = lambda: False) -> "TritonServer":
        """Start, wait until a request went through all models. On an error nothing is left running.

        Raises StartCancelled soon after `cancelled()` becomes true.
        """
        manifest = load_manifest(self.engine_dir, self.options.manifest_sha256)
        prefix_dir = self.options.prefix_dir and self.options.prefix_dir.absolute()
        self.options = dataclasses.replace(
            self.options,
            manifest_sha256=manifest.sha256,
            prefix_dir=prefix_dir,
            engine_command=self.options.engine_command or tuple(process_command(self.engine_dir, manifest.target)),
            python=sys.executable,
        )
        self.addresses = {name: find_address(self.options.address_of(name)) for name in FRONTENDS}
        wanted = {name: (self.addresses[name], getattr(self.options, f"{name}_port")) for name in FRONTENDS}
        triton = find_triton()
        raise_open_files_limit()
        ports_left, starts_left = PORT_ATTEMPTS, START_ATTEMPTS
        while True:
            self.ports = choose_ports(wanted)
            try:
                self._start_once(triton, manifest, cancelled)
                return self
            except PortTakenError as error:
                ports_left -= 1
                if wanted[error.name][1] or not ports_left:
                    raise
            except StartBrokeOffError as error:
                starts_left -= 1
                if not starts_left:
                    raise
                logger.warning("%s; starting it once more", error)

    def _start_once(self, triton: TritonInstall, manifest: Manifest, cancelled: Callable[[], bool]) -> None:
        """On `self.ports`. Raises PortTakenError when one is not free any more."""
        self._sink = LogSink(self.options.log_file, self.options.log_format)
        self._shm_prefix = f"kvforge_{os.getpid()}_{secrets.token_hex(4)}_"
        try:
            run_dir = self._run_dir = make_run_dir()
            self._state = StateReader(run_dir, LONGEST_LOOK_S)
            max_batch_size = self.options.max_num_seqs or manifest.max_num_seqs
            materialise(run_dir / "models", self.engine_dir, max_batch_size, self.options)
            backends = triton.make_backend_dir(run_dir / "backends")
            resources = ServerResources(os.getpid(), run_dir, self._shm_prefix)
            self._process = subprocess.Popen(
                [str(triton.binary), *self._arguments(run_dir, backends)],
                env=with_waits(triton.environment() | resources.environment(), run_dir),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )
            self._server_id = process_id(self._process.pid)
            assert self._process.stdout is not None
            self._log = LogPump(self._process.stdout, self._sink)
            self._wait_ready(self._process, cancelled)
        except OSError as error:
            self.stop()
            raise KvforgeError(cannot_write_run_dir(error)) from None
        except StartBrokeOffError:
            ask(children(self.pid))
            self.stop()
            raise
        except BaseException:
            self.stop()
            raise

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """End the server and all it started; remove its files and shared memory. Idempotent.

        New requests are refused at once. Accepted ones run on for the options' drain_timeout_s or until `hurry()`;
        what is open then gets an error.
        """
        process, self._process = self._process, None
        if process is not None:
            if self._run_dir is not None and self._state is not None and self._is_whole(process):
                busy = partial(cpu_s, process.pid)
                drain(self._run_dir, self._state, self.metrics_url, self.options.drain_timeout_s, hurry, busy)
            # Nothing is open any more, and what a clean exit would release is released here: tritonserver takes
            # three seconds for one, and the whole --exit-timeout-secs after an ensemble that ended in an error.
            self._kill(process)
            self._stubs = {}
        if self._log is not None:
            self._log.join(LOG_TIMEOUT_S)
        if self._sink is not None:
            self._sink.close()
        if self._run_dir is not None:
            ServerResources(os.getpid(), self._run_dir, self._shm_prefix).remove()
            self._run_dir = None
        self._state = None

    def failure(self) -> str | None:
        """Why the server no longer serves, or None: tritonserver or a stub, which it never restarts, ended, or
        the engine cannot be started any more."""
        process = self._process
        if process is None:
            return "tritonserver was not started"
        if (status := process.poll()) is not None:
            return f"tritonserver ended ({how_it_ended(status)})"
        if (ended := self._ended_stub()) is not None:
            # A tritonserver that was killed takes its stubs along, and can be the last of them to be gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"tritonserver ended ({how_it_ended(process.wait(SERVER_FOLLOWS_S))})"
            return ended
        state = self.state
        if state is not None and state.engine == FAILED:
            return f"the engine process does not start any more: {state.reason}"
        return None if state is None else _silence(state)

    def log_error(self) -> str:
        """The log's own words for what went wrong, as one line."""
        return self._with_engine(error_in_log(self._log_lines()))

    def __enter__(self) -> "TritonServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _reached(self, name: str) -> str:
        """HOST:PORT of a frontend for a client on this machine."""
        return f"{self.addresses[name].reached_at.host}:{self.ports[name]}"

    def _ended_stub(self) -> str | None:
        """That the stub of a model has ended, or None."""
        model = next((model for stub, model in self._stubs.items() if not stub.is_alive()), None)
        return None if model is None else f"the process of model '{model}' ended"

    def _is_whole(self, process: subprocess.Popen) -> bool:
        """True while requests can still end by themselves."""
        return process.poll() is None and bool(self._stubs) and all(stub.is_alive() for stub in self._stubs)

    def _kill(self, process: subprocess.Popen) -> None:
        """End tritonserver and all that it started, also what a stub started in its last moment."""
        assert self._run_dir is not None
        left = [*self._stubs, *descendants(process.pid)]
        process.kill()
        process.wait()
        while left := [*left, *processes_of(process.pid, self._server_id), *programs_below(self._run_dir)]:
            kill_all(left)
            if wait_gone(left, END_TIMEOUT_S):
                return
            left = []

    def _arguments(self, run_dir: Path, backends: Path | None) -> list[str]:
        arguments = [
            f"--model-repository={run_dir}/models",
            *address_arguments(self.addresses),
            *(f"--{name}-port={port}" for name, port in self.ports.items()),
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            *([] if self.options.control_apis else closed_control_apis()),
            "--disable-auto-complete-config",
            "--allow-gpu-metrics=false",
            "--pinned-memory-pool-byte-size=0",
            "--log-info=false",
        ]
        return arguments if backends is None else [*arguments, f"--backend-directory={backends}"]

    def _log_lines(self) -> list[str]:
        return [] if self._log is None else self._log.lines()

    def _with_engine(self, words: str) -> str:
        """What a model said, with the engine's path in place of the link by which models read it."""
        return words if self._run_dir is None else words.replace(str(self._run_dir / ENGINE_LINK), str(self.engine_dir))

    def _check_log(self) -> None:
        """Raise the first cause that the log has why the server will not be ready: PortTakenError or KvforgeError."""
        lines = self._log_lines()
        for line in lines:
            if match := re.search(
                r"failed to start (\S+) service: .*Socket '(\S+)' already in use", line, re.IGNORECASE
            ):
                raise PortTakenError(match[1].lower(), f"another process took {match[2]}")
        if (failure := failure_in_log(lines)) is not None:
            raise did_not_start(self._with_engine(failure))

    def _answers(self, process: subprocess.Popen) -> bool:
        """Whether tritonserver answers at all its ports, of which it opens that for metrics last, or does without.
        Raises PortTakenError where somebody else does."""
        urls = {"http": self.http_url, "grpc": self.grpc_url, "metrics": self.metrics_url}
        taken = [name for name, url in urls.items() if accepts(url)]
        if not taken:  # who listens is asked only then: the system's tables of sockets take long to read
            return False
        opened = listened_ports(process.pid)
        closed = [name for name, port in self.ports.items() if opened is not None and port not in opened]
        for name in taken:
            if name in closed and process.poll() is None:
                raise PortTakenError(name, f"another process answers on port {self.ports[name]}")
        return not closed and is_ready(self.http_url) and has_metrics(self.metrics_url)

    def _check_start(self, process: subprocess.Popen, cancelled: Callable[[], bool]) -> None:
        """Raise when the start was cancelled, and the first cause when the server will not be ready."""
        if cancelled():
            raise StartCancelled("the start was cancelled")
        if (status := process.poll()) is not None:
            raise self._ended(process, status)
        self._check_log()

    def _wait_ready(self, process: subprocess.Popen, cancelled: Callable[[], bool]) -> None:
        limit_s, has_begun = START_TIMEOUT_S, False
        deadline = time.monotonic() + limit_s
        while not self._answers(process):
            self._check_start(process, cancelled)
            state = self.state
            if state is not None and (state.engine == LOADING or not has_begun):  # it may load between two looks
                has_begun = True
                limit_s = READY_FOLLOWS_S
                deadline = time.monotonic() + limit_s
            if state is not None and (silence := _silence(state)) is not None:
                raise StartBrokeOffError(f"the server did not start: {silence}")
            if time.monotonic() > deadline:
                after = f"{limit_s:.0f} s" if state is None else f"{limit_s:.0f} s with a loaded engine"
                raise StartBrokeOffError(f"the server was not ready after {after}: {self.log_error()}")
            time.sleep(0.05)
        # Not the engine process: its stub restarts it.
        self._stubs = {stub: model_of_stub(stub) for stub in children(process.pid) if stub.is_alive()}
        if len(self._stubs) < len(MODELS):
            (model, *_) = set(MODELS) - set(self._stubs.values())
            raise did_not_start(f"the process of model '{model}' ended")
        self._first_request(process, cancelled)
        self._check_log()
        make_regions_private(self._shm_prefix)
        if (failure := self.failure()) is not None:
            raise did_not_start(failure)
        yield_to_engine(process.pid)

    def _ended(self, process: subprocess.Popen, status: int) -> KvforgeError:
        """What to raise for a tritonserver that ended while it started. Raises the log's first cause.

        Its stubs get a moment to say why they end; the log has no end before all its writers have ended.
        """
        if self._log is not None:
            self._log.join(SERVER_FOLLOWS_S)
            self._kill(process)
            self._log.join(LOG_TIMEOUT_S)
        self._check_log()
        if status >= 0:
            return did_not_start(self.log_error())
        crash = f"tritonserver ended ({how_it_ended(status)})"
        if -status in ENDED_BY_OTHERS:
            return did_not_start(crash)
        return StartBrokeOffError(f"the server did not start: {self.log_error()}; {crash}")

    def _first_request(self, process: subprocess.Popen, cancelled: Callable[[], bool]) -> None:
        """Through all models. From a thread, because one that gets no answer would outlast a signal by minutes."""
        outcome: queue.SimpleQueue[KvforgeError | None] = queue.SimpleQueue()

        def send() -> None:
            try:
                generate(self.http_url, "ensemble", {"text_input": "a", "max_tokens": 1}, START_TIMEOUT_S)
                outcome.put(None)
            except KvforgeError as error:
                outcome.put(error)

        threading.Thread(target=send, name="first-request", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                error = outcome.get(timeout=0.05)
                if isinstance(error, NoAnswerError):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        error = self._ended(process, process.wait(SERVER_FOLLOWS_S))
                if isinstance(error, NoAnswerError):
                    raise StartBrokeOffError(f"the server did not start: {error}")
                if error is not None and (ended := self._ended_stub()) is not None:
                    raise did_not_start(ended)
                if error is not None:
                    raise error
                return
            self._check_start(process, cancelled)


def _silence(state: EngineState) -> str | None:
    """That the engine's stub has said nothing for too long, or None."""
    if state.age_s <= HUNG_AFTER_S:
        return None
    return f"the process of model 'tensorrt_llm' has said nothing for {state.age_s:.0f} s"
