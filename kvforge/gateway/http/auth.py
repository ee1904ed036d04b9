"""API keys: read once, kept as digests, compared in constant time."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from kvforge.common.errors import KvforgeError

ENVIRONMENT = "KVFORGE_API_KEY"


class ApiKeys:
    """The keys a client may show; without any, every client may call."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path | None) -> "ApiKeys":
        """The keys of a file, one a line, and that of $KVFORGE_API_KEY.

        Raises KvforgeError when the file cannot be read, or a key is empty: a server must not be open by mistake.
        """
        keys = []
        if (key := os.environ.get(ENVIRONMENT)) is not None:
            if not key.strip():
                raise KvforgeError(f"${ENVIRONMENT} is set and empty; give it a key, or unset it to serve without one.")
            keys.append(key.strip())
        if path is not None:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise KvforgeError(f"{path} cannot be read as API keys ({error}); give one key per line.") from None
            if not lines:
                raise KvforgeError(f"{path} holds no API key; write one per line.")
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    raise KvforgeError(f"line {number} of {path} is an empty API key; write one key per line.")
                keys.append(line.strip())
        return cls(keys)

    def __bool__(self) -> bool:
        """Whether clients need a key."""
        return bool(self._digests)

    def allow(self, authorization: str) -> bool:
        """Whether an `Authorization` header shows a key. All keys are compared, whatever matches."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(" ")
        shown = _digest(key.strip())
        found = 0
        for digest in self._digests:
            found |= hmac.compare_digest(digest, shown)
        return bool(found) and scheme.lower() == "bearer"

    def draft_scope(self, authorization: str) -> str:
        """What requests with the key of an allowed header share drafts by (SamplingParams' `draft_scope`): a digest,
        empty without keys."""
        if not self._digests:
            return ""
        return hashlib.sha256(b"draft scope " + _digest(authorization.partition(" ")[2].strip())).hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
