"""The health endpoint asks on a thread of its own, while the server may be stopped or replaced on another."""

from pathlib import Path
from typing import Any

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
