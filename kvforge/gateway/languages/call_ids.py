"""Ids of calls where chat templates do not take any text."""

import hashlib

from kvforge.tokenization.conversation import TemplateId

_ID_LENGTH = 9


def short_ids() -> TemplateId:
    """Of nine letters and digits: the id itself where it fits, else one that only it gives."""
    return _short_id


def numbered_ids(before: str) -> TemplateId:
    """The function's name behind `before`, and the number of the call in its conversation, whatever the id is. The id
    of a result is that of the latest call with the id that it has."""
    given: dict[str, str] = {}
    num_calls = 0

    def numbered(call_id: str, name: str | None = None) -> str:
        nonlocal num_calls
        if name is not None:
            given[call_id] = f"{before}{name}:{num_calls}"
            num_calls += 1
        return given.get(call_id, call_id)

    return numbered


def _short_id(call_id: str, name: str | None = None) -> str:
    if len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_ID_LENGTH]
