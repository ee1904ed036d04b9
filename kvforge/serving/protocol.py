"""Messages between the Triton stub and the engine process: a 4-byte little-endian length, then UTF-8 JSON.

JSON rather than a pickled object: a message can only ever be plain data. Every message is an object with
an `op`. Stub to engine:

    add    {id, prompt: [int], params: {field of SamplingParams: value}}
    abort  {id}                     idempotent
    close  {}                       finish the process

Engine to stub:

    ready   {pid, stats}            once, after loading
    failed  {error}                 loading failed; the process exits
    refused {id, error}             `add` was refused, nothing is kept
    tokens  {outputs: [[id, index, token_ids, logprobs | null, finish_reason | null, detail | null], ...]}
            detail says why for the finish reasons "error" and "abort"
    stats   {stats}                 `LLMEngine.stats()`, when it changed
"""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 256 << 20

Message = dict[str, Any]


class ProtocolError(Exception):
    """The peer sent something that is not a message."""


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> Message | None:
    """The next message, or None when the peer has closed. Raises ProtocolError on a malformed one."""
    header = _read_exactly(sock, _LENGTH.size)
    if header is None:
        return None
    (size,) = _LENGTH.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    body = _read_exactly(sock, size)
    if body is None:
        return None
    try:
        message = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ProtocolError("a message is not an object with an op")
    return message


def _read_exactly(sock: socket.socket, size: int) -> bytes | None:
    """`size` bytes, or None when the peer closed before them (a peer killed mid-message included)."""
    chunks = []
    while size:
        try:
            chunk = sock.recv(min(size, 1 << 20))
        except ConnectionResetError:
            return None
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
