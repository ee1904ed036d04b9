"""The server itself: readiness, metrics, browsers, options, its start and its end."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.common.refusals import QUEUE_FULL, Refusal
from kvforge.gateway import GatewayOptions, gateway_command
from kvforge.gateway.http.server import listen
from kvforge.gateway.options import parse_options
from kvforge.serving.contract.failures import Failure, failed
from kvforge.serving.processes import run_dir
from kvforge.serving.processes.run_dir import STATE_FILE
from tests.cpu.gateway.fake_triton import FakeTriton, Row
from tests.cpu.gateway.http_calls import (
    COMPLETION,
    WAIT_S,
    call,
    connect,
    post,
    read_to_end,
    send_request,
    wait_until,
)


def test_ready(url: str, start: Callable[..., str], triton: FakeTriton, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_dir, "STALE_AFTER_S", 600.0)

    def say(engine: str) -> None:
        state = {"engine": engine, "engine_pid": 1, "active": 0, "time": time.time()}
        (tmp_path / STATE_FILE).write_text(json.dumps(state))

    watched = start(state_file=tmp_path / STATE_FILE)
    assert json.loads(call(watched, "GET", "/ready").body)["reason"] == "the engine's state is not known"
    for engine, status in (("ready", 200), ("loading", 503), ("lost", 503), ("failed", 503), ("ready", 200)):
        say(engine)
        assert call(watched, "GET", "/ready").status == status
    with monkeypatch.context() as patched:
        patched.setattr(run_dir, "STALE_AFTER_S", 0.1)
        wait_until(lambda: call(watched, "GET", "/ready").status == 503)
    assert call(watched, "GET", "/ready").status == 200
    triton.ready = False
    assert call(watched, "GET", "/ready").status == call(url, "GET", "/ready").status == 503
    assert call(watched, "GET", "/health").status == 200


def test_ready_without_a_state_file_asks_the_engine(start: Callable[..., str], triton: FakeTriton) -> None:
    async def broken(request):
        yield Failure("lost", "the engine process ended")

    async def busy(request):
        yield failed("unavailable", Refusal("the queue is full", code=QUEUE_FULL))

    for script, status in ((broken, 503), (busy, 200)):
        triton.script = script
        assert call(start(), "GET", "/ready").status == status


def test_server_that_is_not_there(start: Callable[..., str]) -> None:
    url = start(grpc="127.0.0.1:9")
    answer = post(f"{url}/v1/completions", COMPLETION)
    assert answer.status == 503 and "cannot be reached" in answer.body
    assert call(url, "GET", "/ready").status == 503


def test_cors(url: str, start: Callable[..., str], triton: FakeTriton) -> None:
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in call(url, "OPTIONS", "/v1/models", headers=headers).headers
    allowed = start(cors_origin="https://example.org")
    answer = call(allowed, "OPTIONS", "/v1/completions", headers=headers)
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "https://example.org"


def test_a_web_page_can_read_refusals(start: Callable[..., str], monkeypatch) -> None:
    monkeypatch.setenv("KVFORGE_API_KEY", "secret")
    for origin in ("https://example.org", None):
        answer = call(start(cors_origin=origin), "GET", "/v1/models", headers={"Origin": "https://example.org"})
        assert answer.status == 401 and answer.headers.get("access-control-allow-origin") == origin


def test_metrics(start: Callable[..., str], triton: FakeTriton) -> None:
    url = start()
    post(f"{url}/v1/completions", COMPLETION)
    post(f"{url}/v1/completions", {})
    call(url, "GET", "/nothing")
    text = call(url, "GET", "/metrics").body
    for line in ('{path="/v1/completions",status="200"} 1', '{path="/v1/completions",status="400"} 1',
                 '{path="other",status="404"} 1'):  # fmt: skip
        assert f"kvforge_gateway_requests_total{line}\n" in text
    assert "kvforge_gateway_open_requests 1\n" in text


def test_options_survive_the_command_line(tmp_path: Path) -> None:
    options = GatewayOptions(
        engine=tmp_path, port=0, model_names=("m", "-m2"), chat_template=tmp_path / "t", request_timeout=1.5,
        log_format="json", exit_with_parent=True, cors_origin="*",
    )  # fmt: skip
    assert parse_options(gateway_command(options)[3:]) == options


@pytest.mark.parametrize(("drain_timeout", "ended"), [(60.0, b"[DONE]"), (0.5, b"shutting down")])
def test_sigterm(engine_files: Path, _fake, triton: FakeTriton, drain_timeout: float, ended: bytes) -> None:
    signalled = threading.Event()

    async def script(request):
        """Ends half a second after the signal where there is time, else never."""
        yield Row([100])
        while not signalled.is_set() or drain_timeout < 1:
            yield Row([100])
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        yield Row([100], finish_reason="length")

    triton.script = script
    options = GatewayOptions(engine=engine_files, grpc=_fake[1], port=0, drain_timeout=drain_timeout, log_format="json")
    process = subprocess.Popen(
        gateway_command(options), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        url = process.stdout.readline().decode().split()[-1]
        with connect(url) as sock:
            send_request(sock, {**COMPLETION, "stream": True})
            first = sock.recv(10)
            process.send_signal(signal.SIGTERM)
            signalled.set()
            answer = first + read_to_end(sock)
        assert ended in answer and answer.endswith(b"0\r\n\r\n")
        assert process.wait(WAIT_S) == 0
        record = json.loads(process.stderr.read().splitlines()[-1])
        assert record["path"] == "/v1/completions" and record["status"] == 200 and record["prompt_tokens"] == 1
        assert ("error" in record) == (ended != b"[DONE]")
    finally:
        process.kill()
        process.wait()


def test_no_torch() -> None:
    """The gateway runs where no engine could."""
    code = "import sys, kvforge.gateway.http.server; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout == "False\n"


def test_connections_are_made_without_delay(engine_files: Path) -> None:
    """asyncio sets TCP_NODELAY only on sockets that name their protocol."""
    with listen(GatewayOptions(engine=engine_files, port=0)) as sock:
        assert sock.proto == socket.IPPROTO_TCP


def test_address_that_is_taken(engine_files: Path) -> None:
    with (
        listen(GatewayOptions(engine=engine_files, port=0)) as sock,
        pytest.raises(KvforgeError, match="choose another port"),
    ):
        listen(GatewayOptions(engine=engine_files, port=sock.getsockname()[1]))


def test_start_without_an_engine(tmp_path: Path) -> None:
    command = gateway_command(GatewayOptions(engine=tmp_path, port=0))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith("kvforge: ") and "is not an engine directory" in done.stderr
    assert len(done.stderr.splitlines()) == 1
