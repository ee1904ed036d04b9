"""Ids of requests, and clients that go away, read slowly or set a timeout."""

import itertools
import json
import time
from collections.abc import Callable

import pytest

from kvforge.gateway.engine import triton as triton_module
from tests.cpu.gateway.fake_triton import FakeTriton, Row
from tests.cpu.gateway.http_calls import COMPLETION, call, connect, endless, post, read_to_end, send_request, wait_until


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
@pytest.mark.parametrize("heeds_stop", [True, False])
def test_disconnect_ends_requests(
    url: str, triton: FakeTriton, stream: bool, heeds_stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a `stop`: a stream that goes on is cancelled only where that does not help (docs/load-testing.md)."""
    if not heeds_stop:
        monkeypatch.setattr(triton_module, "STOP_TIMEOUT_S", 0.1)
    triton.heeds_stop = heeds_stop
    triton.script = endless()
    with connect(url) as sock:
        send_request(sock, {**COMPLETION, "prompt": ["x", "y"], "stream": stream})
        wait_until(lambda: len(triton.requests) == 2)
        if stream:
            assert sock.recv(10)
    wait_until(lambda: all(request.cancelled for request in triton.requests))
    assert [request.broken for request in triton.requests] == [not heeds_stop] * 2


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
