"""Messages between the Triton stub and the engine process.

Two little-endian 4-byte lengths, then UTF-8 JSON of the first and plain bytes of the second. JSON rather than a
pickled object: a message can only ever be data. Every message is an object with an `op`. Stub to engine:

    add    {id, prompt: [int], params: {field of SamplingParams: value}, metered?}
                                    `metered`: metrics with every row, not with the last alone
    abort  {id}                     idempotent
    close  {}                       finish the process

Engine to stub:

    ready   {pid, stats}            once, after loading
    failed  {error, replaced?}      loading failed; the process exits. `replaced`: another engine is in its directory
    refused {id, error}             `add` was refused, nothing is kept
    tokens  {outputs: [row, ...]}   see output_rows.py; logits are in the bytes behind the JSON
    stats   {stats}                 `LLMEngine.stats()`, when it changed
"""

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("<II")
MAX_MESSAGE_BYTES = 256 << 20

Message = dict[str, Any]
METERED = "metered"
BLOB = "blob"
"""Where `receive` puts the bytes behind the JSON, if there are any."""


class ProtocolError(Exception):
    """The peer sent something that is not a message, or a message is too large to send."""


def encode(message: Message, blob: bytes = b"") -> bytes:
    """Raises ProtocolError when the message is too large."""
    head = encode_head(message, len(blob))
    return head + blob if blob else head


def encode_head(message: Message, blob_size: int, limit: int = MAX_MESSAGE_BYTES) -> bytes:
    """A message without the `blob_size` bytes that are to follow it. Raises ProtocolError when it is too large."""
    body = json.dumps(message, separators=(",", ":")).encode()
    _check_size(len(body) + blob_size, limit)
    return _LENGTHS.pack(len(body), blob_size) + body


def receive(sock: socket.socket, limit: int = MAX_MESSAGE_BYTES) -> Message | None:
    """The next message, or None when the peer has closed. Raises ProtocolError on a malformed one, and on one of more
    than `limit` bytes."""
    header = _read_exactly(sock, _LENGTHS.size)
    if header is None:
        return None
    size, blob_size = _LENGTHS.unpack(header)
    _check_size(size + blob_size, limit)
    body = _read_exactly(sock, size)
    blob = _read_exactly(sock, blob_size)
    if body is None or blob is None:
        return None
    try:
        message = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ProtocolError("a message is not an object with an op")
    if blob:
        message[BLOB] = blob
    return message


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ProtocolError(f"a message of {size} bytes is over the limit of {limit}")


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
