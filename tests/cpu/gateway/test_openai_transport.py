"""Keys, limits, ids, clients that go away or do not read, and the end of the server."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from kvforge.errors import KvforgeError
from kvforge.gateway import GatewayOptions, body, gateway_command, readiness
from kvforge.gateway.auth import ApiKeys
from kvforge.gateway.options import parse_options
from kvforge.gateway.server import listen
from kvforge.serving.run_dir import STATE_FILE
from tests.cpu.gateway.fake_triton import FakeTriton, Refusal, Row
from tests.cpu.gateway.http_calls import WAIT_S, call, post, wait_until

COMPLETION = {"model": "tiny", "prompt": "x"}


def endless(size: int = 1, pause_s: float = 0.005) -> Callable:
    async def script(request):
        while True:
            yield Row([100] * size)
            await asyncio.sleep(pause_s)

    return script


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=WAIT_S)


def send_request(sock: socket.socket, body: dict) -> None:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)


def read_to_end(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_keys(start: Callable[..., str], triton: FakeTriton, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "keys"
    file.write_text("alpha\n\n beta \n")
    monkeypatch.setenv("KVFORGE_API_KEY", "gamma")
    url = start(api_key_file=file)
    for key in ("alpha", "beta", "gamma"):
        openai.OpenAI(base_url=f"{url}/v1", api_key=key).completions.create(**COMPLETION)
    for header in ({}, {"Authorization": "Bearer alph"}, {"Authorization": "alpha"}, {"Authorization": "Bearer "},
                   {"Authorization": "Basic alpha"}, {"Authorization": "Bearer \xff"}):  # fmt: skip
        for path in ("/v1/models", "/v1/nothing", "/openapi.json", "/metrics"):
            answer = call(url, "GET", path, headers=header)
            assert answer.status == 401 and "alpha" not in answer.body
    with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
        openai.OpenAI(base_url=f"{url}/v1", api_key="delta").models.list()
    assert call(url, "GET", "/health").status == 200
    assert call(url, "GET", "/ready").status == 200
    assert len(triton.requests) == 4  # three completions and the canary


def test_key_files_that_hold_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    for name in ("empty", "missing"):
        with pytest.raises(KvforgeError, match=r"one key per line|one per line"):
            ApiKeys.read(tmp_path / name)


def test_announced_body_is_refused_before_it_is_read(start: Callable[..., str], triton: FakeTriton) -> None:
    url = start(max_body_bytes=1000)
    with connect(url) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
        answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in answer
    assert post(f"{url}/v1/completions", {**COMPLETION, "user": "x" * 900}).status == 200


def test_chunked_body_is_counted(start: Callable[..., str], triton: FakeTriton) -> None:
    url = start(max_body_bytes=1000)
    with connect(url) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            sock.sendall(b"200\r\n" + b"x" * 0x200 + b"\r\n")
        answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert triton.requests == []


def test_bodies_on_their_way_are_bounded_together(start: Callable[..., str], triton: FakeTriton) -> None:
    url = start(max_body_bytes=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(body.MAX_HELD + 1):
            sock = stack.enter_context(connect(url))
            sock.sendall(head + b"x" * 999)
        refused = f"{url}/v1/completions"
        wait_until(lambda: post(refused, {**COMPLETION, "user": "x" * 900}).status == 429)
    wait_until(lambda: post(refused, {**COMPLETION, "user": "x" * 900}).status == 200)


def test_slow_heads_and_bodies(start: Callable[..., str]) -> None:
    url = start(header_timeout=0.3)
    with connect(url) as silent, connect(url) as slow:
        with contextlib.suppress(ConnectionError):  # its time may be over
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        for sock in (silent, slow):
            assert read_to_end(sock) == b""
    with connect(start(body_timeout=0.3)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert read_to_end(half).startswith(b"HTTP/1.1 408 ")


def test_connections_above_the_limit_are_closed(start: Callable[..., str]) -> None:
    url = start(max_connections=2)
    with connect(url) as first, connect(url) as second:
        for sock in (first, second):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        with connect(url) as third:
            third.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_to_end(third) == b""

    def is_let_in() -> bool:
        with contextlib.suppress(ConnectionError):  # the others' ends are still to be noticed
            return call(url, "GET", "/health").status == 200
        return False

    wait_until(is_let_in)


def test_open_requests_above_the_limit(start: Callable[..., str], triton: FakeTriton) -> None:
    url = start(max_requests=1)
    triton.script = endless()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    with client.completions.create(**COMPLETION, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as found:
            client.completions.create(**COMPLETION)
        assert found.value.response.headers["retry-after"] == "1"
    wait_until(lambda: triton.requests[0].cancelled)
    triton.reset()
    assert client.with_options(max_retries=5).completions.create(**COMPLETION).choices[0].text == "hello"


def test_request_ids(url: str, triton: FakeTriton) -> None:
    answer = post(f"{url}/v1/completions", COMPLETION, {"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    answer_id = json.loads(answer.body)["id"]
    assert answer_id.startswith("cmpl-mine-1-") and triton.requests[0].id == f"{answer_id}.0"
    other = post(f"{url}/v1/completions", COMPLETION, {"X-Request-Id": "mine-1"})
    assert json.loads(other.body)["id"] != answer_id
    for odd in ("", "a b", "x" * 200, "\xfc"):
        made = post(f"{url}/v1/completions", COMPLETION, {"X-Request-Id": odd}).headers["x-request-id"]
        assert len(made) == 24


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels(url: str, triton: FakeTriton, stream: bool) -> None:
    triton.script = endless()
    with connect(url) as sock:
        send_request(sock, {**COMPLETION, "prompt": ["x", "y"], "stream": stream})
        wait_until(lambda: len(triton.requests) == 2)
        if stream:
            assert sock.recv(10)
    wait_until(lambda: all(request.cancelled for request in triton.requests))


def wordy(num_rows: int | None) -> Callable:
    """Rows of 200 tokens with much to say about each."""
    top = {token: -1.25 for token in range(100, 120)}

    async def script(request):
        for index in itertools.count() if num_rows is None else range(num_rows):
            last = num_rows is not None and index == num_rows - 1
            request.parameters["num_rows"] = index
            yield Row([100 + index % 26] * 200, 0, [-0.5] * 200, [top] * 200, "length" if last else "")

    return script


def test_slow_reader_holds_the_stream_back_and_is_dropped(start: Callable[..., str], triton: FakeTriton) -> None:
    url = start(write_timeout=1.0)
    triton.script = wordy(None)
    with connect(url) as sock:
        send_request(sock, {**COMPLETION, "stream": True, "logprobs": 20})
        wait_until(lambda: bool(triton.requests))
        # The metrics' own request is the only one left.
        wait_until(lambda: "kvforge_gateway_open_requests 1\n" in call(url, "GET", "/metrics").body)
        # What the sockets' buffers take: a gateway that goes on reading would have taken thousands of rows a second.
        assert triton.requests[0].parameters["num_rows"] < 1000
        assert b"[DONE]" not in read_to_end(sock)


def test_reader_slower_than_the_engine_gets_all(url: str, triton: FakeTriton) -> None:
    triton.script = wordy(60)
    with connect(url) as sock:
        send_request(sock, {**COMPLETION, "stream": True, "logprobs": 20})
        time.sleep(1.0)
        data = bytearray()
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = sock.recv(1 << 20)
            assert part
            data += part
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert texts == [chr(97 + index % 26) * 200 for index in range(60)]


def test_request_timeout_goes_along(start: Callable[..., str], triton: FakeTriton) -> None:
    post(f"{start(request_timeout=2.5)}/v1/completions", COMPLETION)
    assert triton.requests[0].parameters["timeout"] == 2_500_000


def test_ready(url: str, start: Callable[..., str], triton: FakeTriton, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(readiness, "STALE_S", 600.0)

    def say(engine: str) -> None:
        state = {"engine": engine, "engine_pid": 1, "active": 0, "time": time.time()}
        (tmp_path / STATE_FILE).write_text(json.dumps(state))

    watched = start(state_file=tmp_path / STATE_FILE)
    assert json.loads(call(watched, "GET", "/ready").body)["reason"] == "the engine's state is not known"
    for engine, status in (("ready", 200), ("loading", 503), ("lost", 503), ("failed", 503), ("ready", 200)):
        say(engine)
        assert call(watched, "GET", "/ready").status == status
    with monkeypatch.context() as patched:
        patched.setattr(readiness, "STALE_S", 0.1)
        wait_until(lambda: call(watched, "GET", "/ready").status == 503)
    assert call(watched, "GET", "/ready").status == 200
    triton.ready = False
    assert call(watched, "GET", "/ready").status == call(url, "GET", "/ready").status == 503
    assert call(watched, "GET", "/health").status == 200


def test_ready_without_a_state_file_asks_the_engine(start: Callable[..., str], triton: FakeTriton) -> None:
    async def broken(request):
        yield Refusal("lost", "the engine process ended")

    async def busy(request):
        yield Refusal("unavailable", "the queue is full")

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
        engine=tmp_path, port=0, model_name="m", chat_template=tmp_path / "t", request_timeout=1.5, log_format="json",
        exit_with_parent=True, cors_origin="*",
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
        env={**os.environ, "KVFORGE_API_KEY": ""},
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
    code = "import sys, kvforge.gateway.server; print('torch' in sys.modules)"
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
