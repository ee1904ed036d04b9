"""`kvforge serve` as a process of its own, on free ports."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from kvforge.serving.server.ports import PORTS

ROOT = Path(__file__).resolve().parents[3]
SERVE = ("kvforge", "serve")
FAKE = ("tests.support.serving.fake_serve",)
"""The program of `ServeProcess` whose engine computes nothing."""
READY_S = 270.0
"""Longer than the supervisor gives a start before it tries another one."""
FREE_OPENAI = tuple(word for name in PORTS for word in (f"--{name}-port", "0"))
"""Options of `kvforge serve` with which tests beside each other do not meet."""
FREE_PORTS = ("--no-openai", *FREE_OPENAI[:-2])
"""The same, without the gateway."""


class ServeProcess:
    """Entered once the server is ready, with its URLs; whatever still runs at the end is ended.

    `program`: the words behind `python -m`, SERVE or FAKE.
    """

    def __init__(
        self,
        engine_dir: Path,
        *options: str,
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = SERVE,
    ) -> None:
        self._process = _start(engine_dir, options, env, program)
        assert self._process.stdout is not None
        said = ""
        while "health " not in said and (line := self._process.stdout.readline()):
            said += line
        found = re.search(
            r"HTTP (http://\S+:\d+)\b.*gRPC (\S+:\d+)\b.*metrics (http://\S+:\d+/metrics).*health (http://\S+:\d+)",
            said,
            re.DOTALL,
        )
        if found is None:
            self._process.kill()
            raise AssertionError(f"the server did not start: {said}{self._process.communicate()[1]}")
        openai = re.search(r"OpenAI (http://\S+)", said)
        self.openai_url = "" if openai is None else openai[1]
        self.http_url, self.grpc_url, self.metrics_url, self.health_url = found.groups()

    @property
    def pid(self) -> int:
        return self._process.pid

    def health(self, question: str = "ready") -> tuple[int, dict[str, Any]]:
        """Status and body of GET /ready or /live."""
        try:
            with urllib.request.urlopen(f"{self.health_url}/{question}", timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_ready(self, what: str, timeout_s: float = READY_S) -> None:
        """Wait for readiness; AssertionError with the last report when it never came within the time."""
        deadline = time.monotonic() + timeout_s
        while (answer := self.health())[0] != 200:
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s; the server says {answer[1]}"
            time.sleep(0.05)

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def wait(self, timeout_s: float = 180.0) -> tuple[int, str]:
        """Exit status and what it said of errors, once it has ended by itself."""
        _, errors = self._process.communicate(timeout=timeout_s)
        return self._process.returncode, without_notes(errors)

    def __enter__(self) -> "ServeProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            for signum in (signal.SIGTERM, signal.SIGINT):  # two of one kind may arrive as one, which drains first
                self._process.send_signal(signum)
            try:
                _, errors = self._process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                _, errors = self._process.communicate()
            if error is not None:
                print(errors, file=sys.stderr)  # what a failed test shows


def refused_start(engine_dir: Path, *options: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status of a server that is not to start, and what it said of errors."""
    process = _start(engine_dir, options, env, SERVE)
    _, errors = process.communicate(timeout=180)
    return process.returncode, without_notes(errors)


def without_notes(errors: str) -> str:
    """Standard error without the lines that say that a server starts, or still does."""
    return "".join(line for line in errors.splitlines(True) if not re.match(r"kvforge: (still )?starting ", line))


def _start(
    engine_dir: Path, options: tuple[str, ...], env: dict[str, str] | None, program: tuple[str, ...]
) -> subprocess.Popen:
    command = [sys.executable, "-m", *program, str(engine_dir), "--kv-cache-gib", "0.1"]
    command += [*(FREE_OPENAI if "--openai" in options else FREE_PORTS), *options]  # the last word counts
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
