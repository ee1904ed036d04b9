"""What the stub of `tensorrt_llm` tells a text model about its requests, on a connection of their own.

Triton's own way back, a response of one model to another, costs three processes some hundred microseconds each. Here
the tokens that a step gave all requests of a text model leave in one message of the engine's protocol. Text model to
stub:

    hello   {lane}                  once, at first: the lane of the model's stream keys
    open    {num}                   requests that the text model has let in and not ended
    cancel  {key}                   its client has gone, or cannot be answered; idempotent

Stub to text model:

    welcome {}                      once, at first: requests with keys of that lane are taken from now on
    rows    {rows: [row, ...]}      a row is [key, sequence, flags, tokens, context, arrays]

`sequence` counts a request's sequences. `context` are prompt tokens that the first tokens of a sequence are decoded
after. `arrays` are further outputs, name to [dtype, shape, offset into the bytes behind the JSON], or null.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.serving.engine.protocol import BLOB, Message

SEQUENCE_END, REQUEST_END = 1, 2
"""Flags: this row is the last of its sequence, of its request."""
MAX_ROWS_BYTES = 1 << 30
"""Of a message: the logits of a whole answer are in one (size_limits.MAX_LOGITS_BYTES)."""
SOCKET = "text.sock"


@dataclass(frozen=True)
class TextRow:
    """Tokens of one sequence, with further output tensors of the same tokens."""

    key: int
    sequence: int
    flags: int
    tokens: list[int]
    context: list[int]
    arrays: dict[str, np.ndarray]

    @property
    def ends_request(self) -> bool:
        return bool(self.flags & REQUEST_END)


class RowMessage:
    """A `rows` message in the making."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.blobs: list[bytes] = []
        self.num_bytes = 0

    def add(
        self, key: int, sequence: int, flags: int, tokens: list[int], context: list[int],
        arrays: Mapping[str, np.ndarray],
    ) -> None:  # fmt: skip
        """Numbers only: text has no place in a row's arrays."""
        places = {}
        for name, array in arrays.items():
            places[name] = [array.dtype.str, array.shape, self.num_bytes]
            self.blobs.append(array.tobytes())
            self.num_bytes += array.nbytes
        self.rows.append([key, sequence, flags, tokens, context, places or None])

    @property
    def message(self) -> Message:
        return {"op": "rows", "rows": self.rows}


def read_rows(message: Message) -> list[TextRow]:
    """The rows of a `rows` message; their arrays look into its bytes."""
    blob = message.get(BLOB, b"")
    return [
        TextRow(key, sequence, flags, tokens, context, _arrays(places, blob) if places else {})
        for key, sequence, flags, tokens, context, places in message["rows"]
    ]


def _arrays(places: dict[str, list[Any]], blob: bytes) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(blob, dtype, int(np.prod(shape)), offset).reshape(shape)
        for name, (dtype, shape, offset) in places.items()
    }


def socket_path(run_dir: Path) -> Path:
    """Where the stub listens."""
    return run_dir / SOCKET
