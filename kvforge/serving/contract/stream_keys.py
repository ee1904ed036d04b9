"""Keys of requests that come from a text model, which nobody else can make.

A key is 62 bits: a lane, which is the text model's, a counter, and a code over both by a secret that this server's
models share through a file. So a client that calls `tensorrt_llm` directly cannot pass for a text model, which gets its
tokens in another way (text_rows.py), and cannot name another client's request.
"""

import contextlib
import hashlib
import hmac
import itertools
import os
import secrets
from pathlib import Path

import numpy as np

from kvforge.common.errors import RequestError

_CODE_BITS = 32
_COUNTER_BITS = 29
SECRET_FILE = "stream.secret"
STREAM_KEY = "stream_key"


class StreamKeys:
    """Makes and checks keys. `lane` (0 or 1) is its maker's."""

    def __init__(self, folder: Path, lane: int = 0) -> None:
        self._secret = _shared_secret(folder / SECRET_FILE)
        self._lane = lane << _COUNTER_BITS
        self._counter = itertools.count(secrets.randbits(_COUNTER_BITS))

    def make(self) -> int:
        """A key that no other open request has."""
        number = self._lane | next(self._counter) % (1 << _COUNTER_BITS)
        return number << _CODE_BITS | self._code(number)

    def read(self, tensor: np.ndarray | None) -> int | None:
        """The key in an input tensor `stream_key` [batch, 1], None without. Raises RequestError if forged."""
        if tensor is None:
            return None
        keys = set(tensor.reshape(-1).tolist())
        if len(keys) != 1 or not self.is_valid(key := keys.pop()):
            raise RequestError("is for the text models' own use", "leave it out", field="stream_key")
        return key

    def is_valid(self, key: int) -> bool:
        if not 0 <= key < 1 << (_COUNTER_BITS + 1 + _CODE_BITS):
            return False
        return hmac.compare_digest(
            (key & ((1 << _CODE_BITS) - 1)).to_bytes(8, "big"), self._code(key >> _CODE_BITS).to_bytes(8, "big")
        )

    def _code(self, number: int) -> int:
        digest = hmac.digest(self._secret, number.to_bytes(8, "big"), hashlib.sha256)
        return int.from_bytes(digest[: _CODE_BITS // 8], "big")


def lane_of(key: int) -> int:
    """The lane of who made a key."""
    return key >> (_CODE_BITS + _COUNTER_BITS)


def _shared_secret(path: Path) -> bytes:
    """The secret in `path`; whoever comes first writes it, all at once, for its own user only."""
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_bytes()
