"""Phi-4-mini: a list of objects between <|tool_call|> and <|/tool_call|>. Its own template takes tools inside a system
message, so that tools of requests need another one."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.object_format import ObjectFormat

_ENDS = "<|/tool_call|>"

FORMAT = ObjectFormat(
    name="phi4_mini",
    signs=("<|tool|>", "<|/tool|>"),
    foreign=("functools[", "<tool_call>"),
    notation=Notation(begins="<|tool_call|>", opens="[", separates=",", closes="]", ignored=(_ENDS,)),
    ends=_ENDS,
)
