"""Keys, and what bounds bodies, connections and open requests."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from kvforge.gateway.requests import request_body as body
from tests.cpu.gateway.fake_triton import FakeTriton
from tests.cpu.gateway.http_calls import COMPLETION, call, connect, endless, post, read_to_end, wait_until


def test_keys(start: Callable[..., str], triton: FakeTriton, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "keys"
    file.write_text("alpha\n beta \n")
    monkeypatch.setenv("KVFORGE_API_KEY", "gamma")
    url = start(api_key_file=file)
    for key in ("alpha", "beta", "gamma"):
        openai.OpenAI(base_url=f"{url}/v1", api_key=key).completions.create(**COMPLETION)
    for header in ({}, {"Authorization": "Bearer alph"}, {"Authorization": "alpha"}, {"Authorization": "Bearer "},
                   {"Authorization": "Basic alpha"}, {"Authorization": "Bearer \xff"}):  # fmt: skip
        for path in ("/v1/models", "/v1/nothing", "/tokenizer_info", "/metrics"):
            answer = call(url, "GET", path, headers=header)
            assert answer.status == 401 and "alpha" not in answer.body
    scopes = [request.parameters.get("draft_scope") for request in triton.requests]
    assert None not in scopes and len(set(scopes)) == 3, "each key has its own"
    post(f"{url}/v1/completions", COMPLETION, headers={"x-api-key": "beta"})
    assert triton.requests.pop().parameters["draft_scope"] == scopes[1], "the same key has the same"
    with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
        openai.OpenAI(base_url=f"{url}/v1", api_key="delta").models.list()
    for path in ("/health", "/ready", "/openapi.json", "/docs"):  # what any server of this version says
        assert call(url, "GET", path).status == 200
    assert len(triton.requests) == 4  # three completions and the canary


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
