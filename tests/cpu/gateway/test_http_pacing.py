"""Heads, chunks and lengths that cost a server more than they cost their sender."""

import contextlib
import json
from collections.abc import Callable

import h11
import pytest

from kvforge.gateway.http.http_pacing import EVENTS_AT_ONCE, FREE_CHUNKS, MAX_HEAD_BYTES, PacedConnection
from tests.cpu.gateway.fake_triton import FakeTriton
from tests.cpu.gateway.http_calls import COMPLETION, call, connect, read_to_end

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def answer_to(url: str, data: bytes) -> bytes:
    with connect(url) as sock:
        with contextlib.suppress(ConnectionError):  # it answers and closes before all is sent
            sock.sendall(data)
        return read_to_end(sock)


@pytest.mark.parametrize("order", [1, -1])
def test_a_length_given_in_two_ways_is_refused_and_nothing_after_it_is_read(
    url: str, triton: FakeTriton, order: int
) -> None:
    body = json.dumps(COMPLETION).encode()
    names = [b"Content-Length: %d\r\n" % len(body), b"Transfer-Encoding: chunked\r\n"][::order]
    smuggled = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = answer_to(url, HEAD + b"".join(names) + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + smuggled)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert b"send one of them" in answer and b"connection: close" in answer.lower()
    assert triton.requests == []


def test_long_heads_are_refused(url: str) -> None:
    for head in (b"a: " + b"b" * MAX_HEAD_BYTES, b"a:b\r\n" * (MAX_HEAD_BYTES // 5), b"a:b\r\n" * 50_000):
        answer = answer_to(url, b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
    assert call(url, "GET", "/health", headers={"a": "b" * (MAX_HEAD_BYTES - 300)}).status == 200


def chunks(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 64, 1000])
def test_bodies_in_small_chunks_arrive_whole(url: str, triton: FakeTriton, size: int) -> None:
    body = json.dumps({**COMPLETION, "user": "u" * min(size * 3000, 100_000)}).encode()
    with connect(url) as sock:
        sock.sendall(CHUNKED + chunks(body, size) + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = read_to_end(sock)
    assert b"hello" in answer and answer.count(b"HTTP/1.1 200") == 2 and answer.endswith(b'{"status":"ok"}')


def test_too_many_small_chunks_are_refused(url: str, triton: FakeTriton) -> None:
    answer = answer_to(url, CHUNKED + chunks(b"x" * 1_000_000, 1))
    assert answer.startswith(b"HTTP/1.1 400 ") and b"too many small chunks" in answer
    assert triton.requests == []


def test_one_turn_sees_a_bounded_number_of_events() -> None:
    pauses: list[int] = []
    connection = PacedConnection(lambda: pauses.append(1))
    connection.receive_data(CHUNKED + chunks(b"x" * 3000, 1))
    turns: list[int] = []
    while not turns or turns[-1]:
        turns.append(0)
        connection.go_on()
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            turns[-1] += 1
            if isinstance(event, h11.EndOfMessage):
                break
        else:
            continue
        break
    assert max(turns) == EVENTS_AT_ONCE and sum(turns) == 3002
    assert len(pauses) == len(turns) - 1 > 5


def test_chunks_of_an_honest_length_are_never_too_many() -> None:
    connection = PacedConnection(lambda: connection.go_on())
    connection.receive_data(CHUNKED + chunks(b"x" * 64 * 2 * FREE_CHUNKS, 64))
    size = 0
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        connection.go_on()
        size += len(event.data) if isinstance(event, h11.Data) else 0
    assert size == 64 * 2 * FREE_CHUNKS


def test_what_waits_in_a_paused_connection_is_bounded(start: Callable[..., str], monkeypatch) -> None:
    """A client that sends chunks faster than they are worked on is not read from."""
    most = 0
    received = PacedConnection.receive_data

    def receive(self: PacedConnection, data: bytes) -> None:
        nonlocal most
        received(self, data)
        most = max(most, len(self.trailing_data[0]))

    monkeypatch.setattr(PacedConnection, "receive_data", receive)
    body = b'{"user": "' + b"u" * 2_000_000 + b'"}'
    answer_to(start(), CHUNKED + chunks(body, 80) + b"GET /health HTTP/1.1\r\nConnection: close\r\nHost: x\r\n\r\n")
    assert most < 1_000_000
