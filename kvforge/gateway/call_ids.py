"""Ids of calls where chat templates take those of nine letters and digits only."""

import hashlib

_ID_LENGTH = 9


def short_id(call_id: str) -> str:
    """The id itself where it fits, else one that only it gives."""
    if len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_ID_LENGTH]
