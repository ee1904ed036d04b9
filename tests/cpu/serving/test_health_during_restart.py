"""The health endpoint under bursts, and asked while another thread stops or replaces the server."""

import socket
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from kvforge.serving.health_server import _Server
from kvforge.serving.launcher import TritonServer
from kvforge.serving.options import ServerOptions
from kvforge.serving.run_dir import EngineState, StateReader
from kvforge.serving.stop_signals import StopSignals
from kvforge.serving.supervisor import Supervisor


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


def test_a_burst_of_probes_is_let_in() -> None:
    """Nobody accepts here: all of them wait in the queue."""
    with ExitStack() as stack:
        server = stack.enter_context(_Server(("127.0.0.1", 0), BaseHTTPRequestHandler))
        for _ in range(64):
            stack.enter_context(socket.create_connection(server.server_address[:2], timeout=5.0))
