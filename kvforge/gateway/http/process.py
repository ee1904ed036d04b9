"""The OpenAI gateway as a process beside the server: it outlives restarts of the server on the same ports."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvforge.common.errors import KvforgeError
from kvforge.gateway import GatewayOptions, gateway_command
from kvforge.serving.logs.pump import LogPump, LogSink
from kvforge.serving.processes.cleanup import GATEWAY_FOLDER
from kvforge.serving.processes.facts import how_it_ended
from kvforge.serving.processes.priority import lower
from kvforge.serving.processes.run_dir import STATE_FILE, cannot_write_run_dir
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.start_errors import StartCancelled

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""What it gets after the server has ended, and with it all that it waits for."""


class GatewayProcess:
    """Started once the server is ready. `sink` takes its log and stays open."""

    def __init__(self, options: GatewayOptions, sink: LogSink) -> None:
        self._options = dataclasses.replace(options, exit_with_parent=True)
        self._sink = sink
        self._folder: Path | None = None
        self._process: subprocess.Popen | None = None
        self._log: LogPump | None = None
        self.url = ""

    def follow(self, server: TritonServer) -> None:
        """Read the state file of this server from now on: every one has a run directory of its own. Raises KvforgeError
        where that cannot be told."""
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix=GATEWAY_FOLDER))
            fresh = self._folder / "next"
            fresh.symlink_to(server.run_dir / STATE_FILE)
            fresh.replace(self._folder / STATE_FILE)
        except OSError as error:
            raise KvforgeError(cannot_write_run_dir(error)) from None

    def start(self, server: TritonServer, cancelled: Callable[[], bool]) -> None:
        """Start it in front of `server` and wait until it listens. Raises KvforgeError with its own message."""
        self.follow(server)
        assert self._folder is not None
        options = dataclasses.replace(
            self._options,
            engine=server.engine_dir,
            grpc=server.grpc_url,
            metrics=server.metrics_url,
            state_file=self._folder / STATE_FILE,
            manifest_sha256=server.options.manifest_sha256,
        )
        process = self._process = subprocess.Popen(
            gateway_command(options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # How gRPC reaches a server of this machine past the proxies that other variables name.
            env={**os.environ, "no_grpc_proxy": server.grpc_url.rpartition(":")[0].strip("[]")},
        )
        lower(process.pid)
        assert process.stdout is not None
        self._log = LogPump(process.stdout, self._sink)
        deadline = time.monotonic() + START_TIMEOUT_S
        while (url := _url(self._log.lines())) is None:
            if cancelled():
                raise StartCancelled("the start was cancelled")
            if (ended := process.poll()) is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                self._log.join(timeout_s=END_TIMEOUT_S)
                raise KvforgeError(f"the OpenAI gateway did not start: {_reason(ended, self._log.lines())}")
            time.sleep(0.05)
        self.url = url
        self._options = dataclasses.replace(self._options, port=int(re.findall(r":(\d+)", url)[-1]))

    @property
    def port(self) -> int:
        """Where it listens, once it has started."""
        return self._options.port

    @property
    def pid(self) -> int:
        """Raises RuntimeError when none runs."""
        if self._process is None:
            raise RuntimeError("the gateway is not running")
        return self._process.pid

    def failure(self) -> str | None:
        """Why it does not serve, or None."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        return f"the OpenAI gateway ended ({how_it_ended(status)})"

    def drain(self) -> None:
        """No new connections; open answers go on while the server gives them."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _reason(status: int | None, lines: list[str]) -> str:
    """Why it does not listen: its last words, but of a process that a signal ended, which has none. Status None: it
    has not ended."""
    if lines and (status is None or status >= 0):
        return lines[-1].removeprefix("kvforge: ")
    if status is None:
        return f"it did not listen within {START_TIMEOUT_S:.0f} s"
    return f"it ended ({how_it_ended(status)})"


def _url(lines: list[str]) -> str | None:
    for line in lines:
        if match := re.search(r"OpenAI API at (\S+)", line):
            return match[1]
    return None
