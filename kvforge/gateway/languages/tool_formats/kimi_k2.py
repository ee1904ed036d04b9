"""Kimi-K2: calls between marks, each with an id that says the function's name and the call's number."""

import functools

from kvforge.gateway.languages.call_ids import numbered_ids
from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.named_format import NamedFormat

_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_AFTER = "<|tool_call_argument_begin|>"
_BEFORE = "functions."

FORMAT = NamedFormat(
    name="kimi_k2",
    signs=(_CALLS[0], _AFTER),
    foreign=(),
    notation=Notation(begins=_CALL[0], closes=_CALL[1], ignored=_CALLS),
    template_ids=functools.partial(numbered_ids, _BEFORE),
    marks=(*_CALLS, *_CALL, _AFTER),
    wraps=_CALLS,
    before=_BEFORE,
    after=_AFTER,
    ends=_CALL[1],
    id_mark=":",
    numbered=True,
)
