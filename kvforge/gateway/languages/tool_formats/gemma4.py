"""Gemma 4: <|tool_call>call:name{key:value}<tool_call|>, with texts between marks that are tokens."""

from kvforge.gateway.languages.braced_format import BracedFormat
from kvforge.gateway.languages.call_reader import Notation

_NOTATION = Notation(begins="<|tool_call>", closes="<tool_call|>")
_QUOTE = '<|"|>'

FORMAT = BracedFormat(
    name="gemma4",
    signs=(_NOTATION.begins, _QUOTE),
    foreign=(),
    notation=_NOTATION,
    marks=(_NOTATION.begins, _NOTATION.closes, _QUOTE),
    gap="call:",
    quote=_QUOTE,
)
