"""When a server is started again and when not, with servers played by a class; and the health endpoint."""

import dataclasses
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvforge.common.errors import EngineReplacedError, KvforgeError
from kvforge.serving.health.server import HealthServer
from kvforge.serving.processes.run_dir import EngineState
from kvforge.serving.server import supervisor as module
from kvforge.serving.server.options import ServerOptions
from kvforge.serving.server.stop_signals import StopSignals
from kvforge.serving.server.supervisor import RestartPolicy, Supervisor


class FakeServer:
    """`plan` has an entry per server: "lives", "dies" once it serves, or the error of its start."""

    plan: ClassVar[list[str]] = []
    made: ClassVar[list["FakeServer"]] = []

    def __init__(self, engine_dir: Path, options: ServerOptions) -> None:
        digest = options.manifest_sha256 or "digest of the first"
        self.options, self.stopped = dataclasses.replace(options, manifest_sha256=digest), 0
        self.ports = {"http": 1, "grpc": 2, "metrics": 3}
        self.http_url = "http://nowhere"
        self.state: EngineState | None = EngineState("ready", 7, 0, 0.0)
        self.fate = self.plan[len(self.made)]
        self.made.append(self)

    def start(self, cancelled: Callable[[], bool]) -> None:
        if self.fate == "replaced":
            raise EngineReplacedError(self.fate)
        if self.fate not in ("lives", "dies"):
            raise KvforgeError(self.fate)

    def failure(self) -> str | None:
        return "tritonserver ended (signal 9)" if self.fate == "dies" else None

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        self.stopped += 1

    def log_error(self) -> str:
        return "a last word"


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    """Runs a plan; a supervisor whose server lives is told to stop after its first look at it."""
    monkeypatch.setattr(module, "TritonServer", FakeServer)
    monkeypatch.setattr(module, "is_ready", lambda url: True)
    FakeServer.made = []
    signals = StopSignals()

    def sleep(seconds: float) -> None:
        if FakeServer.made[-1].fate == "lives":
            signals.count = 1

    monkeypatch.setattr(module.time, "sleep", sleep)

    def run(
        plan: list[str],
        max_restarts: int = 5,
        draining: Callable[[], None] = lambda: None,
        companion: module.Companion | None = None,
    ) -> Supervisor:
        FakeServer.plan = plan
        policy = RestartPolicy(max_restarts)
        made = Supervisor(Path("engine"), ServerOptions(), signals, policy, companion=companion)
        monkeypatch.setattr(made, "_pause", lambda num_restarts: None)
        made.run(lambda server: None, draining)
        return made

    yield run


def test_a_dead_server_is_replaced_on_the_same_ports(supervise: Callable[..., Supervisor]) -> None:
    stopped: list[bool] = []
    made = supervise(
        ["dies", "a port is taken", "dies", "lives"], draining=lambda: stopped.append(FakeServer.made[-1].stopped)
    )
    assert made.report()["restarts"] == 3 and made.report()["engine_restarts"] == 0
    options = FakeServer.made[-1].options
    assert (options.http_port, options.grpc_port, options.metrics_port) == (1, 2, 3)
    assert all(server.stopped for server in FakeServer.made)
    assert stopped == [False]  # said once, before it is


def test_too_many_deaths_end_it_with_the_reason(supervise: Callable[..., Supervisor]) -> None:
    with pytest.raises(KvforgeError, match=r"signal 9\), after 2 restarts within 300 s; .*: a last word"):
        supervise(["dies"] * 9, max_restarts=2)
    assert len(FakeServer.made) == 3
    assert all(server.stopped for server in FakeServer.made)


def test_no_restart(supervise: Callable[..., Supervisor]) -> None:
    with pytest.raises(KvforgeError, match=r"^tritonserver ended \(signal 9\); its last words: a last word$"):
        supervise(["dies"], max_restarts=0)


def test_a_first_start_that_fails_is_not_repeated(supervise: Callable[..., Supervisor]) -> None:
    with pytest.raises(KvforgeError, match=r"^no such engine$"):
        supervise(["no such engine", "lives"])
    assert len(FakeServer.made) == 1


class Companion:
    """A gateway that starts, though the server has died meanwhile."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self, server: Any, cancelled: Callable[[], bool]) -> None:
        self.said.append("start")

    def follow(self, server: Any) -> None:
        self.said.append("follow")

    def failure(self) -> str | None:
        return None

    def drain(self) -> None:
        self.said.append("drain")

    def stop(self) -> None:
        self.said.append("stop")


def test_a_server_that_dies_before_the_gateway_is_there_has_not_started(supervise: Callable[..., Supervisor]) -> None:
    companion = Companion()
    with pytest.raises(KvforgeError, match=r"^the server did not start: tritonserver ended \(signal 9\)$"):
        supervise(["dies", "lives"], companion=companion)
    assert companion.said == ["start", "drain", "stop"]
    assert [server.stopped for server in FakeServer.made] == [1]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (EngineState("ready", 7, 3, 0.1), None),
        (EngineState("loading", None, 0, 0.1), "the engine is loading"),
        (EngineState("stalled", 7, 3, 0.1), "the engine stopped answering; it was ended and is started again"),
        (EngineState("failed", None, 0, 0.1, reason="no room"), "the engine cannot be started: no room"),
        (EngineState("replaced", None, 0, 0.1, reason="another"), "the engine is not started: another"),
        (EngineState("ready", 7, 0, 9.0), "the process of model 'tensorrt_llm' does not say how the engine is"),
        (None, "the process of model 'tensorrt_llm' does not say how the engine is"),
    ],
)
def test_readiness_is_the_engines(supervise: Callable[..., Supervisor], state: EngineState | None, reason: str) -> None:
    made = supervise(["lives"])
    assert made.report()["reasons"] == ["the server is shutting down"]
    made._signals.count, made._phase = 0, "serving"
    FakeServer.made[-1].state = state
    report = made.report()
    assert report["reasons"] == ([] if reason is None else [reason])
    assert report["ready"] == (reason is None)
    assert report["live"] == (state is None or (state.engine != "stalled" and state.age_s < 5))


def test_an_engine_that_was_replaced_ends_it_at_once(supervise: Callable[..., Supervisor]) -> None:
    """Another engine in the directory does not go away by starting the server again."""
    with pytest.raises(EngineReplacedError):
        supervise(["dies", "replaced", "lives"])
    assert len(FakeServer.made) == 2
    assert FakeServer.made[1].options.manifest_sha256 == "digest of the first"


def get(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_live_right_after_a_start_that_took_long(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(["lives"])
    supervisor._looked_at -= 2 * module.LIVE_WITHIN_S
    supervisor._serving()
    assert supervisor.report()["live"]
    supervisor._looked_at -= 2 * module.LIVE_WITHIN_S
    assert not supervisor.report()["live"]


def test_after_a_standstill_the_server_is_judged_only_once_it_had_time(
    supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have not run either: what they wrote is old, which is no reason to end them."""
    supervisor = supervise(["lives"])
    supervisor._signals.count = 0
    now = time.monotonic()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module.time, "sleep", sleep)
    supervisor._looked_at = now
    now += module.POLL_S
    assert not supervisor._overslept() and not pauses
    now += 3600
    assert supervisor._overslept()
    assert abs(round((sum(pauses) - module.OVERSLEPT_S) / module.POLL_S)) <= 1  # one more by rounding
    assert not supervisor._overslept()


def test_the_health_endpoint_answers_from_the_report() -> None:
    report = {"live": True, "ready": False, "reasons": ["the engine is lost"]}
    health = HealthServer("127.0.0.1", 0, lambda: report)
    try:
        assert get(f"{health.url}/live?verbose") == (200, report)
        assert get(f"{health.url}/ready") == (503, report)
        assert get(f"{health.url}/metrics")[0] == 404
    finally:
        health.close()


def test_a_taken_health_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(KvforgeError, match="--health-port"):
            HealthServer("127.0.0.1", taken.getsockname()[1], dict)


def test_another_engine_process_is_said_and_counted(supervise: Callable[..., Supervisor], caplog) -> None:
    made = supervise(["lives"])
    server, saw = FakeServer.made[-1], []
    for state in (None, EngineState("ready", 7, 0, 0.0), EngineState("loading", None, 0, 0.0),
                  EngineState("ready", 8, 0, 0.0), EngineState("ready", 8, 1, 0.0)):  # fmt: skip
        server.state = state
        made._look_for_another_engine()
        saw.append(made.report()["engine_restarts"])
    assert saw == [0, 0, 0, 1, 1]
    assert [record.getMessage() for record in caplog.records if "engine process" in record.getMessage()] == [
        "the engine process 7 ended; process 8 serves now"
    ]
