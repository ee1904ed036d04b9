"""Processes that die, and the server's end: errors instead of silence, and nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from kvforge.serving.health import generate
from kvforge.serving.launcher import ServerOptions, TritonServer
from kvforge.serving.processes import ProcessId, children, descendants, wait_gone
from tests.support.serving import ENDLESS, ask, text_of, used_pages, wait_until

SHARED_MEMORY = Path("/dev/shm")
TEXT = "hello there"


def engine_process(server: TritonServer) -> ProcessId:
    (found,) = [p for p in descendants(server.pid) if b"engine_process" in Path(f"/proc/{p.pid}/cmdline").read_bytes()]
    return found


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_engine_killed(server: TritonServer, model: str) -> None:
    before = text_of(server, ask("ensemble", TEXT, 8))
    with StreamingClient(server.grpc_url) as client:
        prompt = TEXT if model == "ensemble" else [5, 6, 7]
        responses = client.generate(model, ask(model, prompt, ENDLESS))
        next(responses)
        os.kill(engine_process(server).pid, signal.SIGKILL)
        with pytest.raises(KvforgeError, match=r"engine process ended unexpectedly .signal 9"):
            for _ in responses:
                pass
    assert text_of(server, ask("ensemble", TEXT, 8)) == before
    wait_until(lambda: used_pages(server) == 0, "all pages free")
    assert server.failure() is None


@pytest.fixture
def own_server(engine_dir: Path) -> Iterator[TritonServer]:
    with TritonServer(engine_dir, ServerOptions(kv_cache_gib=0.1)) as running:
        yield running


def test_a_killed_model_process_is_noticed(own_server: TritonServer) -> None:
    """tritonserver neither restarts it nor says so, so that `kvforge serve` has to look and end."""
    stubs = children(own_server.pid)
    assert len(stubs) == 3
    assert own_server.failure() is None
    os.kill(stubs[0].pid, signal.SIGKILL)
    wait_until(lambda: own_server.failure() is not None, "the failure")


def test_tritonserver_killed_leaves_nothing(own_server: TritonServer) -> None:
    processes = descendants(own_server.pid)
    prefix = own_server.shm_prefix
    assert len(processes) == 4
    assert list(SHARED_MEMORY.glob(f"{prefix}*"))
    with StreamingClient(own_server.grpc_url) as client:
        responses = client.generate("ensemble", ask("ensemble", TEXT, ENDLESS))
        next(responses)
        os.kill(own_server.pid, signal.SIGKILL)
        with pytest.raises(KvforgeError):
            for _ in responses:
                pass
    assert wait_gone(processes, timeout_s=20) == []
    assert own_server.failure() is not None
    own_server.stop()
    assert not list(SHARED_MEMORY.glob(f"{prefix}*"))


def serve(engine_dir: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "kvforge", "serve", str(engine_dir), "--kv-cache-gib", "0.1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_serve_until_sigterm(engine_dir: Path) -> None:
    regions = set(SHARED_MEMORY.iterdir())
    process = serve(engine_dir, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    assert process.stdout is not None
    line = process.stdout.readline()
    processes = descendants(process.pid)
    try:
        match = re.search(r"(http://127\.0\.0\.1:\d+), gRPC (127\.0\.0\.1:\d+)", line)
        assert match, process.communicate(timeout=60)[1]
        assert generate(match[1], "ensemble", {"text_input": TEXT, "max_tokens": 4})["text_output"]
        with StreamingClient(match[2]) as client:
            responses = client.generate("ensemble", ask("ensemble", TEXT, ENDLESS))
            next(responses)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(KvforgeError):
                for _ in responses:
                    pass
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors == ""
    assert len(processes) == 5
    assert wait_gone(processes, timeout_s=10) == []
    assert {r for r in SHARED_MEMORY.iterdir() if r.name.startswith("kvforge_")} <= regions


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_port_taken(engine_dir: Path, name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {other: "0" for other in ("http", "grpc", "metrics")} | {name: str(port)}
        process = serve(engine_dir, *(word for other in ports for word in (f"--{other}-port", ports[other])))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith(f"kvforge: error: cannot listen on 127.0.0.1:{port}")
    assert f"--{name}-port" in errors
    assert errors.count("\n") == 1


def test_not_an_engine(tmp_path: Path) -> None:
    process = serve(tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "is not an engine directory" in errors
    assert errors.count("\n") == 1


def test_an_engine_that_does_not_load(engine_dir: Path) -> None:
    """The engine's own sentence comes out, not a log."""
    with pytest.raises(KvforgeError, match=r"kv_cache_gib is -1\.0") as caught:
        TritonServer(engine_dir, ServerOptions(kv_cache_gib=-1.0)).start()
    assert "\n" not in str(caught.value) and "At:" not in str(caught.value)
