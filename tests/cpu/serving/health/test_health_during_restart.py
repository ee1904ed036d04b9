"""The health endpoint under bursts, and asked while another thread stops or replaces the server."""

import resource
import socket
import subprocess
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvforge.common.addresses import find_address
from kvforge.common.errors import KvforgeError
from kvforge.serving.health.server import ACCEPT_PAUSE_S, BACKLOG, HealthServer, _Server
from kvforge.serving.processes.run_dir import EngineState, StateReader
from kvforge.serving.server import launcher
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.options import ServerOptions
from kvforge.serving.server.start_errors import StartCancelled
from kvforge.serving.server.stop_signals import StopSignals
from kvforge.serving.server.supervisor import Supervisor


def test_a_server_that_is_replaced_meanwhile() -> None:
    class Replaced:
        http_url = "http://127.0.0.1:1"

        @property
        def state(self) -> EngineState | None:
            supervisor._server = TritonServer(Path("."))  # which has no ports yet
            return None

        def failure(self) -> str | None:
            return None

    supervisor = Supervisor(Path("."), ServerOptions(), StopSignals())
    supervisor._phase = "serving"
    supervisor._server = Replaced()  # type: ignore[assignment]
    assert "tritonserver is not ready" in supervisor.report()["reasons"]


def test_a_server_that_is_stopped_meanwhile() -> None:
    class Stopping(TritonServer):
        looks = 0

        @property
        def _state(self) -> Any:
            self.looks += 1
            return StateReader(Path("/absent")) if self.looks == 1 else None

        @_state.setter
        def _state(self, value: Any) -> None: ...

    assert Stopping(Path(".")).state is None


def test_a_start_whose_first_request_gets_no_answer_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, over = threading.Event(), threading.Event()

    def generate(*request: object) -> None:
        waiting.set()
        over.wait()
        raise KvforgeError("the server did not answer: it ended")

    monkeypatch.setattr(launcher, "generate", generate)
    server = TritonServer(Path("."))
    server.addresses, server.ports = {"http": find_address("127.0.0.1")}, {"http": 1}
    process = Mock(spec=subprocess.Popen)
    with pytest.raises(StartCancelled):
        server._first_request(process, waiting.is_set)
    over.set()
    with pytest.raises(KvforgeError, match="it ended"):
        server._first_request(process, lambda: False)


def test_probes_are_let_in_again_once_there_are_descriptors() -> None:
    health = HealthServer("127.0.0.1", 0, lambda: {"live": True, "ready": True})
    port = int(health.url.rpartition(":")[2])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early, socket.socket() as late:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            early.connect(("127.0.0.1", port))
            early.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
            early.settimeout(3 * ACCEPT_PAUSE_S)
            with pytest.raises(TimeoutError):
                early.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        late.connect(("127.0.0.1", port))
        late.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        for client in (early, late):
            client.settimeout(60.0)
            assert b" 200 " in client.recv(100)
    health.close()


def test_a_burst_of_probes_is_let_in() -> None:
    """Nobody accepts here: all of them wait in the queue."""
    with ExitStack() as stack:
        server = stack.enter_context(_Server(find_address("127.0.0.1").listen(0, BACKLOG), BaseHTTPRequestHandler))
        for _ in range(64):
            stack.enter_context(socket.create_connection(server.server_address[:2], timeout=5.0))
