"""Clients that connect and vanish: each kind leaves the server with something half done."""

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable

import grpc
from tritonclient.grpc import service_pb2_grpc

from kvforge.serving.server.launcher import TritonServer
from tests.support.fuzz.cases import Case
from tests.support.fuzz.known import tensor
from tests.support.fuzz.wire import generate_json, grpc_request

LONG = 50000
"""Tokens that no vanishing client waits for."""


def endless(model: str) -> Case:
    """A request that runs on for much longer than a test, unless its client's end ends it."""
    if model == "tensorrt_llm":
        prompt = (tensor("input_ids", "INT32", 5, 6, 7), tensor("input_lengths", "INT32", 3))
        ask = (tensor("request_output_len", "INT32", LONG), tensor("streaming", "BOOL", True))
    else:
        prompt = (tensor("text_input", "BYTES", b"once"),)
        ask = (tensor("max_tokens", "INT32", LONG), tensor("stream", "BOOL", True))
    return Case(model, (*prompt, *ask, tensor("end_id", "INT32", -1)))


def connect_only(server: TritonServer, rng: random.Random) -> None:
    with _connection(server.ports[rng.choice(["http", "grpc"])], rng.random() < 0.5):
        _pause(rng)


def half_a_request(server: TritonServer, rng: random.Random) -> None:
    with _connection(server.ports["http"], rng.random() < 0.5) as connection:
        request = _http_request(rng)
        connection.sendall(request[: rng.randrange(len(request))])
        _pause(rng)


def full_request(server: TritonServer, rng: random.Random) -> None:
    """An SSE stream whose client goes before, at or after the first events, or when it has waited for them in vain:
    answers in time are asked of the clients that stay."""
    with _connection(server.ports["http"], rng.random() < 0.5) as connection:
        connection.sendall(_http_request(rng))
        if rng.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                connection.recv(200)
        _pause(rng)


def grpc_channel(server: TritonServer, rng: random.Random) -> None:
    """A stream whose channel closes under it."""
    with grpc.insecure_channel(server.grpc_url, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = stub.ModelStreamInfer(iter([grpc_request(endless(rng.choice(["ensemble", "tensorrt_llm"])))]))
        if rng.random() < 0.5:
            next(responses)
        _pause(rng)


KINDS: dict[Callable[[TritonServer, random.Random], None], int] = {
    connect_only: 4, half_a_request: 3, full_request: 2, grpc_channel: 1,
}  # fmt: skip
"""Kind of client to its share of all."""


def vanish(server: TritonServer, seed: object) -> None:
    """One client of some kind, from `seed`."""
    rng = random.Random(str(seed))
    (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
    kind(server, rng)


def _connection(port: int, reset: bool) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    if reset:  # some end with a reset, as those of killed machines do
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connection


def _http_request(rng: random.Random) -> bytes:
    model = rng.choice(["ensemble", "tensorrt_llm"])
    body = generate_json(endless(model))
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _pause(rng: random.Random) -> None:
    time.sleep(rng.choice([0.0, 0.0, 0.001, 0.01, 0.05]))
