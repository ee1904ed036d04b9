"""Processes that die, and the server's end: errors instead of silence, and nothing left behind."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.common.addresses import Address
from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import generate
from kvforge.serving.processes.facts import ProcessId, children, descendants, model_of_stub, wait_gone
from kvforge.serving.server import launcher
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from kvforge.serving.server.ports import choose_ports
from kvforge.serving.server.repository import MODELS
from tests.support.serving.fake_server import fake_server
from tests.support.serving.serve_process import FAKE, ServeProcess, refused_start
from tests.support.serving.server import (
    ENDLESS,
    WAIT_S,
    ask,
    engine_process,
    lasting_processes,
    started,
    text_of,
    used_pages,
)

SHARED_MEMORY = Path("/dev/shm")
TEXT = "hello there"


@pytest.fixture
def own_server(engine_dir: Path) -> Iterator[TritonServer]:
    with started(fake_server(engine_dir)) as running:
        yield running


def test_a_start_that_stands_still_is_made_again(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "READY_FOLLOWS_S", 2.0)
    # The one that is stopped here is not to be the one that a busy machine may make stand still.
    monkeypatch.setattr(launcher, "START_ATTEMPTS", launcher.START_ATTEMPTS + 1)
    log = tmp_path / "log"
    server = fake_server(engine_dir, log_file=log)
    stopped: list[ProcessId] = []

    def freeze() -> None:
        while not stopped:
            stubs = children(server.pid) if server._process is not None else []
            stopped.extend(stub for stub in stubs if model_of_stub(stub) == "postprocessing")
        os.kill(stopped[0].pid, signal.SIGSTOP)
        wait_gone(stopped, timeout_s=WAIT_S)
        monkeypatch.undo()

    freezer = threading.Thread(target=freeze, daemon=True)
    freezer.start()
    with server:
        freezer.join()
        assert wait_gone(stopped, timeout_s=WAIT_S) == []
        assert text_of(server, ask("ensemble", TEXT, 8))
    assert "the server was not ready after 2 s with a loaded engine" in caplog.text
    assert "watchdog.py" in log.read_text(), "the other processes have said where they stand"


def test_tritonserver_killed_leaves_nothing(own_server: TritonServer) -> None:
    processes = descendants(own_server.pid)
    prefix = own_server.shm_prefix
    assert len(lasting_processes(own_server.pid)) == len(MODELS) + 1
    assert list(SHARED_MEMORY.glob(f"{prefix}*"))
    with StreamingClient(own_server.grpc_url) as client:
        responses = client.generate("ensemble", ask("ensemble", TEXT, ENDLESS))
        next(responses)
        os.kill(own_server.pid, signal.SIGKILL)
        with pytest.raises(KvforgeError):
            for _ in responses:
                pass
    assert wait_gone(processes, timeout_s=WAIT_S) == []
    assert own_server.failure() is not None
    own_server.stop()
    assert not list(SHARED_MEMORY.glob(f"{prefix}*"))


def test_who_hangs_is_ended_by_the_others(own_server: TritonServer) -> None:
    """A stub may wait for ever for an answer of the killed server, and then cannot end itself."""
    processes = descendants(own_server.pid)
    (stub,) = [p for p in children(own_server.pid) if model_of_stub(p) == "postprocessing"]
    for hanging in (stub, engine_process(own_server.pid)):
        os.kill(hanging.pid, signal.SIGSTOP)
    os.kill(own_server.pid, signal.SIGKILL)
    assert wait_gone(processes, timeout_s=WAIT_S) == []


def test_serve_until_sigterm(engine_dir: Path) -> None:
    """A request that is open when the time to drain is over gets an error, and nothing stays behind."""
    with ServeProcess(engine_dir, "--drain-timeout", "0.3", program=FAKE) as running:
        processes, lasting = descendants(running.pid), lasting_processes(running.pid)
        assert list(SHARED_MEMORY.glob(f"kvforge_{running.pid}_*"))
        assert generate(running.http_url, "ensemble", {"text_input": TEXT, "max_tokens": 4})["text_output"]
        with StreamingClient(running.grpc_url) as client:
            responses = client.generate("ensemble", ask("ensemble", TEXT, ENDLESS))
            next(responses)
            running.signal(signal.SIGTERM)
            with pytest.raises(KvforgeError):
                for _ in responses:
                    pass
        status, errors = running.wait()
    assert (status, errors) == (0, "")
    assert len(lasting) == len(MODELS) + 2  # tritonserver, a stub per model, the engine
    assert wait_gone(processes, timeout_s=WAIT_S) == []
    assert not list(SHARED_MEMORY.glob(f"kvforge_{running.pid}_*"))


@pytest.mark.parametrize("name", ["http", "grpc", "metrics", "health"])
def test_port_taken(engine_dir: Path, name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, errors = refused_start(engine_dir, f"--{name}-port", str(port))
    assert status == 1
    assert errors.startswith(f"kvforge: error: cannot listen on 127.0.0.1:{port}")
    assert f"--{name}-port" in errors
    assert errors.count("\n") == 1


@pytest.mark.with_full(name=["grpc"])
@pytest.mark.parametrize("name", ["grpc", "metrics"])
def test_a_free_port_that_is_taken_before_the_server_listens(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Another one is chosen; tritonserver itself would do without metrics."""
    chosen: list[dict[str, int]] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def choose(wanted: dict[str, tuple[Address, int]]) -> dict[str, int]:
            ports = choose_ports(wanted)
            chosen.append(ports if chosen else {**ports, name: taken.getsockname()[1]})
            return chosen[-1]

        monkeypatch.setattr(launcher, "choose_ports", choose)
        with fake_server(engine_dir) as running:
            assert len(chosen) == 2 and running.ports == chosen[1]
            assert text_of(running, ask("ensemble", TEXT, 2))
            assert used_pages(running) >= 0


def test_not_an_engine(tmp_path: Path) -> None:
    status, errors = refused_start(tmp_path)
    assert status == 1
    assert "is not an engine directory" in errors
    assert errors.count("\n") == 1


def test_an_engine_that_does_not_load(engine_dir: Path) -> None:
    """The engine's own sentence comes out, not a log."""
    with pytest.raises(KvforgeError, match=r"kv_cache_gib is -1\.0") as caught:
        TritonServer(engine_dir, ServerOptions(kv_cache_gib=-1.0)).start()
    assert "\n" not in str(caught.value) and "At:" not in str(caught.value)
