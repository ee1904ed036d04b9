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

        Raises KvforgeError when the file cannot be read or holds no key: a server must not be open by mistake.
        """
        keys = [os.environ[ENVIRONMENT].strip()] if os.environ.get(ENVIRONMENT, "").strip() else []
        if path is not None:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise KvforgeError(f"{path} cannot be read as API keys ({error}); give one key per line.") from None
            found = [line.strip() for line in lines if line.strip()]
            if not found:
                raise KvforgeError(f"{path} holds no API key; write one per line.")
            keys += found
        return cls(keys)

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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
