"""Plain HTTP calls, for what no well-behaved client sends."""

import asyncio
import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.cpu.gateway.fake_triton import Row

COMPLETION = {"model": "tiny", "prompt": "x"}
WAIT_S = 60.0
"""Far more than anything takes, also where the machine has other work."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: str


def call(
    url: str, method: str, path: str, data: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """One request on a connection of its own; header names of the answer in lower case."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)
    try:
        connection.request(method, path, data, dict(headers or {}))
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, response.read().decode())
    finally:
        connection.close()


def post(url: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
    """POST a JSON body."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    return call(url, "POST", parts.path, data, {"Content-Type": "application/json", **(headers or {})})


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.01)


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
