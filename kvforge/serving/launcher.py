"""Starts and stops a Triton server for one engine: `with TritonServer(engine_dir) as server: ...`."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvforge.engine import load_manifest
from kvforge.errors import KvforgeError
from kvforge.serving.access import PRIVATE_UMASK, closed_control_apis, make_regions_private
from kvforge.serving.health import generate, is_ready
from kvforge.serving.options import ServerOptions, engine_command
from kvforge.serving.ports import choose_ports
from kvforge.serving.processes import ProcessId, children, descendants, wait_gone
from kvforge.serving.repository import materialise
from kvforge.serving.triton_install import find_triton

EXIT_TIMEOUT_S = 5
"""What tritonserver gives running requests to finish after it is told to end."""
START_TIMEOUT_S = 180.0
SHARED_MEMORY = Path("/dev/shm")


class TritonServer:
    """One server process with its stubs and its engine process; all of them end with `stop()`.

    `command` replaces the engine process's argument list. Raises KvforgeError from `start()` when the engine
    directory is none, a port is taken, there is no tritonserver, or the models do not load.
    """

    def __init__(
        self, engine_dir: str | Path, options: ServerOptions | None = None, command: Sequence[str] | None = None
    ) -> None:
        self.engine_dir = Path(engine_dir).resolve()
        self.options = options or ServerOptions()
        self._command = command or engine_command(self.engine_dir, self.options)
        self._process: subprocess.Popen | None = None
        self._run_dir: Path | None = None
        self._shm_prefix = ""
        self._children: list[ProcessId] = []
        self.ports: dict[str, int] = {}

    @property
    def http_url(self) -> str:
        return f"http://{self.options.address}:{self.ports['http']}"

    @property
    def grpc_url(self) -> str:
        return f"{self.options.address}:{self.ports['grpc']}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.options.address}:{self.ports['metrics']}/metrics"

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
    def log_path(self) -> Path:
        assert self._run_dir is not None
        return self.options.log_file or self._run_dir / "triton.log"

    def start(self) -> "TritonServer":
        """Start, wait until a request went through all models. On an error nothing is left running."""
        manifest = load_manifest(self.engine_dir)
        wanted = {name: getattr(self.options, f"{name}_port") for name in ("http", "grpc", "metrics")}
        triton = find_triton()
        self.ports = choose_ports(self.options.address, wanted)
        # A Unix socket's path takes 107 bytes at most, so a long $TMPDIR cannot be used.
        parent = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 60 else None
        self._run_dir = Path(tempfile.mkdtemp(prefix="kvforge-serve-", dir=parent))
        self._shm_prefix = f"kvforge_{os.getpid()}_{secrets.token_hex(4)}_"
        try:
            limits = self.options.request_limits
            max_batch_size = self.options.max_num_seqs or manifest.max_num_seqs
            materialise(self._run_dir / "models", self.engine_dir, self._command, max_batch_size, limits)
            backends = triton.make_backend_dir(self._run_dir / "backends")
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(triton.binary), *self._arguments(backends)],
                    env=triton.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    umask=PRIVATE_UMASK,
                )
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and all it started; remove its files and shared memory. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            self._children = [*self._children, *descendants(process.pid)]
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                _wait_or_kill(process)
            for child in wait_gone(self._children, timeout_s=3.0):
                child.kill()
            self._children = []
        if self._shm_prefix:
            for region in SHARED_MEMORY.glob(f"{self._shm_prefix}*"):
                with contextlib.suppress(FileNotFoundError):
                    region.unlink()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = None

    def failure(self) -> str | None:
        """Why the server no longer serves, or None: tritonserver or a stub, which it never restarts, ended."""
        if self._process is None or self._process.poll() is not None:
            return "tritonserver ended"
        if any(not child.is_alive() for child in self._children):
            return "a model's backend process ended"
        return None

    def log_error(self) -> str:
        """The log's own words for what went wrong, as one line."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        for line in lines:
            if match := re.search(r"failed to load '\w+' version \d+: \w+: (?:TritonModelException: )?(.+)", line):
                return match.group(1).split(r"\n\nAt:")[0]  # without the Python traceback behind it
        errors = [line for line in lines if re.match(r"[EF]\d{4} ", line) or line.startswith("error:")]
        return (errors or lines or ["its log is empty"])[-1]

    def __enter__(self) -> "TritonServer":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _arguments(self, backends: Path | None) -> list[str]:
        address = self.options.address
        arguments = [
            f"--model-repository={self._run_dir}/models",
            f"--http-address={address}",
            f"--grpc-address={address}",
            f"--metrics-address={address}",
            *(f"--{name}-port={port}" for name, port in self.ports.items()),
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            *([] if self.options.control_apis else closed_control_apis()),
            "--disable-auto-complete-config",
            "--allow-gpu-metrics=false",
            "--pinned-memory-pool-byte-size=0",
            "--log-info=false",
        ]
        return arguments if backends is None else [*arguments, f"--backend-directory={backends}"]

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready(self.http_url):
            if self._process.poll() is not None:
                raise KvforgeError(f"the server did not start: {self.log_error()}")
            if time.monotonic() > deadline:
                raise KvforgeError(f"the server was not ready after {START_TIMEOUT_S:.0f} s: {self.log_error()}")
            time.sleep(0.05)
        generate(self.http_url, "ensemble", {"text_input": "a", "max_tokens": 1})
        make_regions_private(self._shm_prefix)
        # Not the engine process: its stub restarts it.
        self._children = children(self._process.pid)


def _wait_or_kill(process: subprocess.Popen) -> None:
    """Wait for a server told to end. Once its stubs are done there is nothing to lose, and it gets a second more:
    an ensemble that answered with errors is sometimes never unloaded, and tritonserver waits for it in vain."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S + 5
    while process.poll() is None and time.monotonic() < deadline:
        if not children(process.pid):
            deadline = min(deadline, time.monotonic() + 1)
        time.sleep(0.05)
    process.kill()
    process.wait()
