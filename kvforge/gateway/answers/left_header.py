"""The headers that say which tools' schemas no guide keeps, and which tools the model is not told of."""

import json
from collections.abc import Mapping, Sequence

LEFT_HEADER = "x-kvforge-unguided"
LEFT_TOOLS_HEADER = "x-kvforge-tools-left-out"
MAX_VALUE = 4096
"""Bytes of the header's value: proxies take no large heads."""


def left_header(left: Mapping[str, Sequence[str]]) -> list[tuple[bytes, bytes]]:
    """Tools by name with the keywords that are left to the model, as ASCII JSON; nothing where there are none. Under
    "..." stands how many more tools there are where the header has no room for all."""
    if not left:
        return []
    written = list(left.items())
    while len(value := _value(written, len(left) - len(written))) > MAX_VALUE:
        written.pop()
    return [(LEFT_HEADER.encode(), value)]


def left_tools_header(types: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Types of tools, as a JSON list; nothing where there are none."""
    return [(LEFT_TOOLS_HEADER.encode(), json.dumps(list(types)).encode())] if types else []


def _value(written: Sequence[tuple[str, Sequence[str]]], more: int) -> bytes:
    return json.dumps({**dict(written), **({"...": more} if more else {})}).encode()
