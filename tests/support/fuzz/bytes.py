"""Bodies and byte streams that are broken below the level of tensors: JSON, lengths, HTTP, HTTP/2."""

import json
import random
import socket
from collections.abc import Callable

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GENERATE = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: a\r\n"


def break_body(rng: random.Random, body: bytes) -> bytes:
    """`body`, JSON, with something broken that a JSON parser or its caller has to notice."""
    return rng.choice(_BODIES)(rng, body)


def _truncate(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body) + 1)]


def _flip(rng: random.Random, body: bytes) -> bytes:
    broken = bytearray(body or b"{")
    for _ in range(rng.choice([1, 1, 4, 40])):
        broken[rng.randrange(len(broken))] = rng.randrange(256)
    return bytes(broken)


def _deep(rng: random.Random, body: bytes) -> bytes:
    depth = rng.choice([50, 1000, 20000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    nested = opening * depth + b"1" + closing * depth
    return b'{"text_input": ' + nested + b', "max_tokens": 1}' if rng.random() < 0.7 else nested


def _value(rng: random.Random, body: bytes) -> bytes:
    """One field of another JSON type."""
    data = json.loads(body)
    values = [None, True, -1, 2**31, 2**70, 1e999, 0.5, "", "text", [], [1, "a"], [[1]], {}, {"a": 1}, "\u0000", "NaN"]
    if data:
        data[rng.choice(list(data))] = rng.choice(values)
    return json.dumps(data).encode()


def _several(rng: random.Random, body: bytes) -> bytes:
    return rng.choice([body + body, b"[" + body + b"]", b"", b"null", b'"text"', b"0", b"\xef\xbb\xbf" + body])


def _twice(rng: random.Random, body: bytes) -> bytes:
    return body[:-1] + b', "max_tokens": "x", "max_tokens": [1], "text_input": 1}'


_BODIES: list[Callable[[random.Random, bytes], bytes]] = [_truncate, _flip, _deep, _value, _several, _twice]


def garbage(rng: random.Random) -> bytes:
    """What no client of the protocol would send to the port."""
    kind = rng.randrange(8)
    noise = rng.randbytes(rng.choice([1, 20, 500, 5000]))
    if kind == 0:
        return noise
    if kind == 1:
        return HTTP2_PREFACE + noise
    if kind == 2:  # a frame of HTTP/2 with a length that does not come
        frame = rng.randrange(2**24).to_bytes(3, "big") + bytes([rng.randrange(12), rng.randrange(256)])
        return HTTP2_PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + frame + rng.randbytes(4) + noise
    if kind == 3:  # a body shorter or longer than announced
        length = rng.choice([b"0", b"1", b"100000", b"-1", b"99999999999999999999", b"x", b"5, 6"])
        return (
            b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: a\r\nContent-Length: " + length + b"\r\n\r\n{" + noise
        )
    if kind == 4:
        chunk = rng.choice([b"5\r\nabc", b"zz\r\n", b"ffffffffffffffff\r\na", b"-1\r\n", b"0\r\n\r\n"])
        return GENERATE + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + noise
    if kind == 5:
        return (
            b"GET /" + b"a" * rng.choice([10, 9000]) + rng.choice([b" HTTP/9.9\r\n\r\n", b"\r\n\r\n", b" HTTP/1.1\r\n"])
        )
    if kind == 6:
        return b"GET /v2 HTTP/1.1\r\n" + (noise.replace(b"\n", b"") + b": b\r\n") * rng.choice([1, 30]) + b"\r\n"
    size = rng.choice([b"-1", b"0", b"5", b"99999999999"])
    head = b"POST /v2/models/preprocessing/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n"
    return head + b"Inference-Header-Content-Length: " + size + b"\r\n\r\n" + b'{"inputs": []}      '


def throw(port: int, data: bytes) -> bytes:
    """Send `data`, say that nothing more comes, and read what comes back until the server closes or is quiet."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(0.05)  # a server may wait for the rest of a request for ever, as it is allowed to
            while piece := connection.recv(65536):
                received += piece
        except OSError:
            pass
    return received
